"""The same attention for training: neighbouring queries share one dense block of keys, and nothing of it is kept.

A part is some rows of one sequence; its keys are all window positions and entries that any of them sees, under a mask.
Kept for the backward are q, the pages and, per row and head, lse = log(Σ_j exp(l_j) + exp(sink)). With g the gradient
of out, p_j = exp(l_j - lse) and δ = g·out:

    dl_j = p_j (g·k_j - δ),   dq = scale Σ_j dl_j k_j,   dk_j = scale dl_j q + p_j g,   dsink = -δ exp(sink - lse)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from spyglass.ops.linear_block.training import multiply
from spyglass.ops.sparse_attention.reference import flat_rows

_LOGITS_AT_ONCE = 1 << 25
_QUERIES_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class _Places:
    """Where keys lie and who sees them: all arguments of the op that have no gradient."""

    window_table_SP: torch.Tensor
    seq_T: torch.Tensor
    lo_T: torch.Tensor
    hi_T: torch.Tensor
    pool_table_SP: torch.Tensor | None
    visible_T: torch.Tensor | None
    picks_TX: torch.Tensor | None
    pool_width: int


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
    picks_TX: torch.Tensor | None = None,
    pool_width: int = 0,
) -> torch.Tensor:
    """See `reference.py`. Picks must be different entries; the choice of them has no gradient."""
    entries = 0 if pool_NBD is None or visible_T is None or not len(visible_T) else int(visible_T.max())
    places = _Places(window_table_SP, seq_T, lo_T, hi_T, pool_table_SP, visible_T, picks_TX, entries)
    out_THD: torch.Tensor = _Attention.apply(q_THD, window_NBD, pool_NBD, sink_H, places, scale)  # type: ignore[no-untyped-call]
    return out_THD


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        window_NBD: torch.Tensor,
        pool_NBD: torch.Tensor | None,
        sink_H: torch.Tensor,
        places: _Places,
        scale: float,
    ) -> torch.Tensor:
        heads = q_THD.shape[1]
        parts = list(_parts(places, heads))
        out_THD, lse_TH = torch.empty_like(q_THD), q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        for part in parts:
            keys_KD, logits = _logits(part, q_THD, window_NBD, pool_NBD, places, scale)
            top = logits.amax(dim=-1, keepdim=True).clamp(min=-1e30)
            p = torch.exp(logits - top)
            total = p.sum(dim=-1, keepdim=True) + torch.exp(sink_H.float()[:, None] - top)
            out = multiply(p.to(q_THD.dtype).flatten(0, 1), keys_KD).unflatten(0, (-1, heads)) / total
            out_THD[part.rows] = out.to(q_THD.dtype)
            lse_TH[part.rows] = (top + total.log())[..., 0]
        ctx.save_for_backward(q_THD, window_NBD, pool_NBD, sink_H, out_THD, lse_TH)
        ctx.places, ctx.scale, ctx.parts = places, scale, parts
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THD, window_NBD, pool_NBD, sink_H, out_THD, lse_TH = ctx.saved_tensors
        grad_THD, heads, dtype = grads[0], q_THD.shape[1], q_THD.dtype
        dq_THD = torch.empty_like(q_THD)
        pages = [window_NBD] if pool_NBD is None else [window_NBD, pool_NBD]
        dpages = [torch.zeros_like(page, dtype=torch.float32).flatten(0, 1) for page in pages]
        delta_TH = (grad_THD.float() * out_THD.float()).sum(dim=-1)
        dsink_H = -(delta_TH * torch.exp(sink_H.float() - lse_TH)).sum(dim=0)
        for part in ctx.parts:
            keys_KD, logits = _logits(part, q_THD, window_NBD, pool_NBD, ctx.places, ctx.scale)
            grad = grad_THD[part.rows].flatten(0, 1)
            p = torch.exp(logits - lse_TH[part.rows, :, None]).flatten(0, 1)
            dp = multiply(grad, keys_KD.mT) - delta_TH[part.rows].flatten()[:, None]
            dlogits = (p * dp * ctx.scale).to(dtype)
            dq_THD[part.rows] = multiply(dlogits, keys_KD).unflatten(0, (-1, heads)).to(dtype)
            dkeys_KD = multiply(dlogits.mT, q_THD[part.rows].flatten(0, 1)) + multiply(p.to(dtype).mT, grad)
            for dpage, rows, dkeys in zip(
                dpages, part.sources(ctx.places, pages), dkeys_KD.split(part.counts(len(pages))), strict=True
            ):
                dpage.index_add_(0, rows, dkeys)
        dwindow, *dpool = (dpage.view(page.shape).to(page.dtype) for dpage, page in zip(dpages, pages, strict=True))
        return dq_THD, dwindow, dpool[0] if dpool else None, dsink_H.to(sink_H.dtype), None, None


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows `first .. stop - 1`, all of one sequence, which see window positions low .. high and `entries` entries."""

    first: int
    stop: int
    low: int
    high: int
    entries: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.stop)

    def counts(self, num_pages: int) -> list[int]:
        """Keys from the window and, where there is one, from the pool."""
        return [self.high - self.low + 1, self.entries][:num_pages]

    def sources(self, places: _Places, pages: list[torch.Tensor]) -> list[torch.Tensor]:
        """Flat page rows of the keys, window first."""
        device, seq = places.seq_T.device, places.seq_T[self.first : self.first + 1]
        position = torch.arange(self.low, self.high + 1, device=device)[None]
        rows = [flat_rows(places.window_table_SP, seq, position, pages[0].shape[1])[0]]
        if len(pages) > 1:
            assert places.pool_table_SP is not None
            entry = torch.arange(self.entries, device=device)[None]
            rows.append(flat_rows(places.pool_table_SP, seq, entry, pages[1].shape[1])[0])
        return rows


def _parts(places: _Places, heads: int) -> Iterator[_Part]:
    """All rows, cut where the sequence changes or a block of logits grows too large; one read from the device."""
    columns = [places.seq_T, places.lo_T, places.hi_T]
    columns.append(torch.zeros_like(places.lo_T) if places.visible_T is None else places.visible_T)
    rows: list[list[int]] = torch.stack(columns).T.tolist()
    first, low, high, entries = 0, 0, -1, 0
    for row, (seq, lo, hi, visible) in enumerate(rows):
        wide = max(high, hi) - min(low, lo) + 1 + max(entries, visible)
        full = row - first >= _QUERIES_AT_ONCE or (row - first + 1) * heads * wide > _LOGITS_AT_ONCE
        if row > first and (full or seq != rows[first][0]):
            yield _Part(first, row, low, high, entries)
            first = row
        if row == first:
            low, high, entries = lo, hi, visible
        low, high, entries = min(low, lo), max(high, hi), max(entries, visible)
    if rows:
        yield _Part(first, len(rows), low, high, entries)


def _logits(
    part: _Part,
    q_THD: torch.Tensor,
    window_NBD: torch.Tensor,
    pool_NBD: torch.Tensor | None,
    places: _Places,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [K, D] of q's dtype and logits fp32 [rows, H, K], -inf where a row does not see a key."""
    pages = [window_NBD] if pool_NBD is None else [window_NBD, pool_NBD]
    rows = part.sources(places, pages)
    keys_KD = torch.cat([page.flatten(0, 1)[row] for page, row in zip(pages, rows, strict=True)])
    position = torch.arange(part.low, part.high + 1, device=q_THD.device)
    seen = [(position >= places.lo_T[part.rows, None]) & (position <= places.hi_T[part.rows, None])]
    if pool_NBD is not None:
        assert places.visible_T is not None
        seen.append(_seen_entries(part, places, places.visible_T[part.rows, None]))
    seen_TK = torch.cat(seen, dim=1)
    # memory that no row sees may hold anything, NaN included
    keys_KD = keys_KD.masked_fill(~seen_TK.any(dim=0)[:, None], 0.0).to(q_THD.dtype)
    logits = multiply(q_THD[part.rows].flatten(0, 1), keys_KD.mT).unflatten(0, (-1, q_THD.shape[1])) * scale
    return keys_KD, logits.masked_fill(~seen_TK[:, None], float("-inf"))


def _seen_entries(part: _Part, places: _Places, visible_T1: torch.Tensor) -> torch.Tensor:
    seen_TP = torch.arange(part.entries, device=visible_T1.device) < visible_T1
    if places.picks_TX is None:
        return seen_TP
    picks_TX = places.picks_TX[part.rows].long()
    picked_TP = torch.zeros(len(picks_TX), part.entries + 1, dtype=torch.bool, device=picks_TX.device)
    none = (picks_TX < 0) | (picks_TX >= part.entries)
    return seen_TP & picked_TP.scatter_(1, torch.where(none, part.entries, picks_TX), True)[:, :-1]
