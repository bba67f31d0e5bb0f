"""Multi-query attention over a window of raw rows and a choice of compressed rows, with one sink per head.

Key and value are the same vector, shared by all heads (spec v4 4.5).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spyglass.ops.rope_partial.reference import rope_partial
from spyglass.ops.row_finish.reference import row_finish
from spyglass.quant.formats import StoredRow
from spyglass.quant.rows import read_rows

_QUERIES_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The rotation of q and back: tables fp32 [T, R / 2], and the norm of q before (`eps` None = none)."""

    cos_TR: torch.Tensor
    sin_TR: torch.Tensor
    eps: float | None = None
    stepwise: bool = False


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
    """l_j = scale · q_h·k_j,  p_j = exp(l_j - m),  out_h = Σ_j round(p_j) k_j / (Σ_j p_j + exp(sink_h - m)).

    j runs over window positions lo_T..hi_T of the query's sequence and over compressed entries: those listed in
    `topk_indices_TX` (int32 entry numbers, -1 = none), or all below `visible_T` when there is no list; one at or above
    `visible_T` is ignored. `window_width` / `pool_width` bound the two counts. Pages [num_pages, page_rows, D], or
    bytes of their formats, are read as CacheView says. Logits, softmax and sums in fp32; p is rounded to q's dtype
    before the product with the rows; output has q's dtype. A row without any key gives zeros. With `turn` q is
    row_finish(q) and the output is rope_partial(output, inverse).
    """
    if turn is not None:
        q_THD = row_finish(q_THD, turn.cos_TR, turn.sin_TR, eps=turn.eps, stepwise=turn.stepwise)
    parts = [
        _attend(
            q_THD[t : t + _QUERIES_AT_ONCE],
            *_window_rows(window_NBD, window_table_SP, seq_T, lo_T, hi_T, window_width, slice(t, t + _QUERIES_AT_ONCE)),
            *_pool_rows(
                pool_NBD, pool_table_SP, seq_T, visible_T, topk_indices_TX, pool_width, slice(t, t + _QUERIES_AT_ONCE)
            ),
            sink_H=sink_H,
            scale=scale,
            formats=(window_format, pool_format),
        )
        for t in range(0, len(q_THD), _QUERIES_AT_ONCE)
    ]
    out_THD = torch.cat(parts) if parts else torch.empty_like(q_THD)
    return out_THD if turn is None else rope_partial(out_THD, turn.cos_TR, turn.sin_TR, inverse=True)


def _attend(
    q_THD: torch.Tensor,
    window_TWD: torch.Tensor,
    window_ok_TW: torch.Tensor,
    pool_TXD: torch.Tensor | None,
    pool_ok_TX: torch.Tensor | None,
    *,
    sink_H: torch.Tensor,
    scale: float,
    formats: tuple[StoredRow | None, StoredRow | None],
) -> torch.Tensor:
    keys, ok = read_rows(window_TWD, formats[0], torch.float32), window_ok_TW
    if pool_TXD is not None and pool_ok_TX is not None:
        pooled = read_rows(pool_TXD, formats[1], torch.float32)
        keys, ok = torch.cat([keys, pooled], dim=1), torch.cat([ok, pool_ok_TX], dim=1)
    # an absent row may hold anything, NaN included: it must not reach the product
    keys = torch.where(ok[:, :, None], keys, 0.0)
    logits = torch.einsum("thd,tkd->thk", q_THD.float(), keys) * scale
    logits = logits.masked_fill(~ok[:, None], float("-inf"))
    top = logits.amax(dim=-1, keepdim=True).clamp(min=-1e30)
    p = torch.exp(logits - top)
    total = p.sum(dim=-1, keepdim=True) + torch.exp(sink_H.float()[None, :, None] - top)
    out = torch.einsum("thk,tkd->thd", p.to(q_THD.dtype).float(), keys) / total
    return out.to(q_THD.dtype)


def flat_rows(table_SP: torch.Tensor, seq_T: torch.Tensor, row_TX: torch.Tensor, page_rows: int) -> torch.Tensor:
    """Flat page rows (int64) of logical rows `row_TX` >= 0 of each query's sequence, as CacheView defines them."""
    row_TX = row_TX.long()
    page = table_SP[seq_T.long()[:, None], (row_TX // page_rows) % table_SP.shape[1]]
    return page.long() * page_rows + row_TX % page_rows


def _window_rows(
    pages: torch.Tensor,
    table: torch.Tensor,
    seq: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    width: int,
    part: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    position = lo[part, None] + torch.arange(width, device=lo.device)
    ok = position <= hi[part, None]
    rows = flat_rows(table, seq[part], torch.where(ok, position, 0), pages.shape[1])
    return pages.flatten(0, 1)[rows.clamp(min=0)], ok


def _pool_rows(
    pages: torch.Tensor | None,
    table: torch.Tensor | None,
    seq: torch.Tensor,
    visible: torch.Tensor | None,
    topk_indices: torch.Tensor | None,
    width: int,
    part: slice,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if pages is None or width == 0:
        return None, None
    assert table is not None and visible is not None
    entry = torch.arange(width, device=seq.device)[None] if topk_indices is None else topk_indices[part]
    ok = (entry >= 0) & (entry < visible[part, None])
    rows = flat_rows(table, seq[part], torch.where(ok, entry, 0), pages.shape[1])
    return pages.flatten(0, 1)[rows.clamp(min=0)], ok
