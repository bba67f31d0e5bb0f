"""Attention of training on a GPU: the forward that serves, and a backward of three products and a launch per block.

Nothing is kept but the arguments. Sums into pages have a fixed order: no two parts of a block are of one sequence, and
blocks follow one another, so a row of a page gets at most one addend in a launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from spyglass.ops.rope_partial.triton import rope_partial
from spyglass.ops.row_finish import triton as row_finish
from spyglass.ops.row_finish.training import gradient_of_rows
from spyglass.ops.sparse_attention import triton
from spyglass.ops.sparse_attention.blocks import Block, KeyRows, blocks_of, keys_of
from spyglass.ops.sparse_attention.reference import Turn


@dataclass(frozen=True, slots=True)
class How:
    """What has no gradient."""

    places: KeyRows
    scale: float
    window_width: int
    pool_width: int
    turn: Turn | None


def attend(
    q_THD: torch.Tensor, window_NBD: torch.Tensor, pool_NBD: torch.Tensor | None, sink_H: torch.Tensor, how: How
) -> torch.Tensor:
    """`sparse_attention`."""
    out_THD: torch.Tensor = _Attention.apply(q_THD, window_NBD, pool_NBD, sink_H, how)  # type: ignore[no-untyped-call]
    return out_THD


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        window_NBD: torch.Tensor,
        pool_NBD: torch.Tensor | None,
        sink_H: torch.Tensor,
        how: How,
    ) -> torch.Tensor:
        places = how.places
        ctx.save_for_backward(q_THD, window_NBD, pool_NBD, sink_H)
        ctx.how = how
        return triton.sparse_attention(
            q_THD,
            window_NBD,
            places.window_table_SP,
            places.seq_T,
            places.lo_T,
            places.hi_T,
            sink_H,
            scale=how.scale,
            window_width=how.window_width,
            pool_NBD=pool_NBD,
            pool_table_SP=places.pool_table_SP,
            visible_T=places.visible_T,
            topk_indices_TX=places.topk_indices_TX,
            pool_width=how.pool_width,
            turn=how.turn,
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THD, window_NBD, pool_NBD, sink_H = ctx.saved_tensors
        how: How = ctx.how
        turn, grad_THD, turned_THD = how.turn, grads[0].contiguous(), q_THD.contiguous()
        if turn is not None:  # the gradient of turning back is turning
            grad_THD = rope_partial(grad_THD, turn.cos_TR, turn.sin_TR)
            options: dict[str, Any] = {"eps": turn.eps, "stepwise": turn.stepwise}
            turned_THD = row_finish.row_finish(q_THD, turn.cos_TR, turn.sin_TR, **options)
        pages = [window_NBD] if pool_NBD is None else [window_NBD, pool_NBD]
        dpages = [torch.zeros_like(page, dtype=torch.float32).flatten(0, 1) for page in pages]
        dsink_H = torch.zeros(len(sink_H), dtype=torch.float32, device=q_THD.device)
        dq_THD = q_THD.new_empty(len(q_THD) + 1, *q_THD.shape[1:])  # the last row is where padding goes
        for parts in blocks_of(how.places, q_THD.shape[1]):
            block = Block.of(parts, q_THD.device)
            dkeys_MKD, dsink_QH = _of_block(block, turned_THD, grad_THD, pages, sink_H, how, dq_THD)
            dsink_H += dsink_QH.sum(dim=0)
            sources, counts = block.sources(how.places, pages), block.counts(len(pages))
            for dpage, rows, dkeys in zip(dpages, sources, dkeys_MKD.split(counts, dim=1), strict=True):
                dpage.index_add_(0, rows.flatten(), dkeys.flatten(0, 1))
        dwindow, *dpool = (dpage.view(page.shape).to(page.dtype) for dpage, page in zip(dpages, pages, strict=True))
        dq_THD = dq_THD[:-1]
        if turn is not None:
            dq_THD = gradient_of_rows(q_THD, turn.cos_TR, turn.sin_TR, dq_THD, eps=turn.eps, stepwise=turn.stepwise)
        return dq_THD, dwindow, dpool[0] if dpool else None, dsink_H.to(sink_H.dtype), None


def _of_block(
    block: Block,
    q_THD: torch.Tensor,
    grad_THD: torch.Tensor,
    pages: list[torch.Tensor],
    sink_H: torch.Tensor,
    how: How,
    dq_THD: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write dq of the block's rows; its keys' gradients, fp32, and the sink's by row."""
    from spyglass.ops.linear_block.low_rank import product
    from spyglass.ops.sparse_attention.triton_training import softmax_gradient

    keys_MKD, seen_MQK = keys_of(block, pages, how.places, q_THD.dtype)
    (count, queries), (heads, dim) = block.rows_MQ.shape, q_THD.shape[1:]
    both_MRD = q_THD.new_empty(count, 2, queries, heads, dim)
    both_MRD[:, 0], both_MRD[:, 1] = q_THD[block.rows_MQ], grad_THD[block.rows_MQ]
    both_MRD = both_MRD.view(count, -1, dim)
    products_MRK = product(both_MRD, keys_MKD.mT, torch.float32)
    slopes_MRK = torch.empty_like(products_MRK, dtype=q_THD.dtype)
    dsink_QH = softmax_gradient(products_MRK, seen_MQK.contiguous(), sink_H, how.scale, slopes_MRK)
    dq_MXD = product(slopes_MRK[:, : queries * heads], keys_MKD, q_THD.dtype)
    block.put(dq_THD, dq_MXD.view(count, queries, heads, dim))
    return product(slopes_MRK.mT, both_MRD, torch.float32), dsink_QH
