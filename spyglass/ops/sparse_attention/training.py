"""The same attention for training: neighbouring queries share one dense block of keys, and nothing of it is kept.

Kept for the backward are q, the pages and, per row and head, lse = log(Σ_j exp(l_j) + exp(sink)). With g the gradient
of out, p_j = exp(l_j - lse) and δ = g·out = Σ_j p_j g·k_j:

    dl_j = p_j (g·k_j - δ),   dq = scale Σ_j dl_j k_j,   dk_j = scale dl_j q + p_j g,   dsink = -δ exp(sink - lse)

On a GPU the forward is the kernel that serves, and one launch makes dl and p of a block's products (`fused.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from spyglass.ops import gpu
from spyglass.ops.linear_block.training import multiply
from spyglass.ops.rope_partial.reference import rope_partial
from spyglass.ops.row_finish.training import row_finish
from spyglass.ops.sparse_attention import fused, triton
from spyglass.ops.sparse_attention.blocks import Block, KeyRows, blocks_of, keys_of
from spyglass.ops.sparse_attention.reference import Turn
from spyglass.quant.formats import StoredRow


def sparse_attention(
    q_THD: torch.Tensor,
    window_NBD: torch.Tensor,
    window_table_SP: torch.Tensor,
    seq_T: torch.Tensor,
    lo_T: torch.Tensor,
    hi_T: torch.Tensor,
    sink_H: torch.Tensor,
    *,
    scale: float,
    window_width: int,
    pool_NBD: torch.Tensor | None = None,
    pool_table_SP: torch.Tensor | None = None,
    visible_T: torch.Tensor | None = None,
    topk_indices_TX: torch.Tensor | None = None,
    pool_width: int = 0,
    turn: Turn | None = None,
    window_format: StoredRow | None = None,
    pool_format: StoredRow | None = None,
) -> torch.Tensor:
    """See `reference.py`; rows are plain. Picks must be different entries; the choice of them has no gradient."""
    assert window_NBD.dtype != torch.uint8, "codes have no gradient"
    places = KeyRows(window_table_SP, seq_T, lo_T, hi_T, pool_table_SP, visible_T, topk_indices_TX)
    if gpu.trains(q_THD, window_NBD) and triton.suits(q_THD, window_NBD, pool_NBD):
        how = fused.How(places, scale, window_width, pool_width, turn)
        return fused.attend(q_THD, window_NBD, pool_NBD, sink_H, how)
    if turn is not None:
        q_THD = row_finish(q_THD, turn.cos_TR, turn.sin_TR, eps=turn.eps, stepwise=turn.stepwise)
    out_THD: torch.Tensor = _Attention.apply(q_THD, window_NBD, pool_NBD, sink_H, places, scale)  # type: ignore[no-untyped-call]
    return out_THD if turn is None else rope_partial(out_THD, turn.cos_TR, turn.sin_TR, inverse=True)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        window_NBD: torch.Tensor,
        pool_NBD: torch.Tensor | None,
        sink_H: torch.Tensor,
        places: KeyRows,
        scale: float,
    ) -> torch.Tensor:
        rows, heads = q_THD.shape[:2]
        blocks = [Block.of(parts, q_THD.device) for parts in blocks_of(places, heads)]
        # the last row is where padding goes
        out_THD = q_THD.new_empty(rows + 1, *q_THD.shape[1:])
        lse_TH = torch.empty(rows + 1, heads, dtype=torch.float32, device=q_THD.device)
        pages = [window_NBD] if pool_NBD is None else [window_NBD, pool_NBD]
        for block in blocks:
            keys_MKD, seen_MQK = keys_of(block, pages, places, q_THD.dtype)
            logits = _logits(q_THD[block.rows_MQ], keys_MKD, seen_MQK, scale)
            top = logits.amax(dim=-1, keepdim=True).clamp(min=-1e30)
            p = torch.exp(logits - top)
            total = p.sum(dim=-1, keepdim=True) + torch.exp(sink_H.float()[:, None] - top)
            out = multiply(p.to(q_THD.dtype).flatten(1, 2), keys_MKD).view(*p.shape[:3], -1) / total
            block.put(out_THD, out)
            block.put(lse_TH, (top + total.log())[..., 0])
        out_THD, lse_TH = out_THD[:rows], lse_TH[:rows]
        ctx.save_for_backward(q_THD, window_NBD, pool_NBD, sink_H, out_THD, lse_TH)
        ctx.places, ctx.scale, ctx.blocks = places, scale, blocks
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THD, window_NBD, pool_NBD, sink_H, out_THD, lse_TH = ctx.saved_tensors
        grad_THD, dtype = grads[0], q_THD.dtype
        dq_THD = q_THD.new_empty(len(q_THD) + 1, *q_THD.shape[1:])
        pages = [window_NBD] if pool_NBD is None else [window_NBD, pool_NBD]
        dpages = [torch.zeros_like(page, dtype=torch.float32).flatten(0, 1) for page in pages]
        delta_TH = (grad_THD.float() * out_THD.float()).sum(dim=-1)
        dsink_H = -(delta_TH * torch.exp(sink_H.float() - lse_TH)).sum(dim=0)
        for block in ctx.blocks:
            keys_MKD, seen_MQK = keys_of(block, pages, ctx.places, dtype)
            q, grad = q_THD[block.rows_MQ], grad_THD[block.rows_MQ].flatten(1, 2)
            logits = _logits(q, keys_MKD, seen_MQK, ctx.scale)
            p = torch.exp(logits - lse_TH[block.rows_MQ, :, None]).flatten(1, 2)
            dp = multiply(grad, keys_MKD.mT) - delta_TH[block.rows_MQ].flatten(1, 2)[..., None]
            dlogits = (p * dp * ctx.scale).to(dtype)
            block.put(dq_THD, multiply(dlogits, keys_MKD).view(q.shape))
            dkeys_MKD = multiply(dlogits.mT, q.flatten(1, 2)) + multiply(p.to(dtype).mT, grad)
            for dpage, rows, dkeys in zip(
                dpages, block.sources(ctx.places, pages), dkeys_MKD.split(block.counts(len(pages)), dim=1), strict=True
            ):
                dpage.index_add_(0, rows.flatten(), dkeys.flatten(0, 1))
        dwindow, *dpool = (dpage.view(page.shape).to(page.dtype) for dpage, page in zip(dpages, pages, strict=True))
        return dq_THD[:-1], dwindow, dpool[0] if dpool else None, dsink_H.to(sink_H.dtype), None, None


def _logits(q_MQHD: torch.Tensor, keys_MKD: torch.Tensor, seen_MQK: torch.Tensor, scale: float) -> torch.Tensor:
    """fp32 [M, Q, H, K], -inf where a row does not see a key."""
    logits = multiply(q_MQHD.flatten(1, 2), keys_MKD.mT).unflatten(1, q_MQHD.shape[1:3]) * scale
    return logits.masked_fill_(~seen_MQK[:, :, None], float("-inf"))
