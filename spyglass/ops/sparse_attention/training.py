"""The same attention for training: neighbouring queries share one dense block of keys, and nothing of it is kept.

A part is some rows of one sequence; its keys are all window positions and entries that any of them sees, under a mask.
Parts of different sequences are padded to one block and computed together. Kept for the backward are q, the pages and,
per row and head, lse = log(Σ_j exp(l_j) + exp(sink)). With g the gradient of out, p_j = exp(l_j - lse) and δ = g·out:

    dl_j = p_j (g·k_j - δ),   dq = scale Σ_j dl_j k_j,   dk_j = scale dl_j q + p_j g,   dsink = -δ exp(sink - lse)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import torch

from spyglass.ops.linear_block.training import multiply
from spyglass.ops.rope_partial.reference import rope_partial
from spyglass.ops.row_finish.training import row_finish
from spyglass.ops.sparse_attention.reference import Turn, flat_rows

LOGITS_AT_ONCE = 1 << 25  # of a part
_LOGITS_OF_A_BLOCK = 1 << 26
_QUERIES_AT_ONCE = 256
_ALIGNED = 8  # keys: what matrix units like, on a GPU


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Where keys lie and who sees them: all arguments of the op that have no gradient."""

    window_table_SP: torch.Tensor
    seq_T: torch.Tensor
    lo_T: torch.Tensor
    hi_T: torch.Tensor
    pool_table_SP: torch.Tensor | None
    visible_T: torch.Tensor | None
    picks_TX: torch.Tensor | None


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
    turn: Turn | None = None,
) -> torch.Tensor:
    """See `reference.py`. Picks must be different entries; the choice of them has no gradient."""
    if turn is not None:
        q_THD = row_finish(q_THD, turn.cos_TR, turn.sin_TR, eps=turn.eps, stepwise=turn.stepwise)
    places = KeyRows(window_table_SP, seq_T, lo_T, hi_T, pool_table_SP, visible_T, picks_TX)
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
        blocks = [_Block.of(parts, q_THD.device) for parts in blocks_of(places, heads)]
        # the last row is where padding goes
        out_THD = q_THD.new_empty(rows + 1, *q_THD.shape[1:])
        lse_TH = torch.empty(rows + 1, heads, dtype=torch.float32, device=q_THD.device)
        pages = [window_NBD] if pool_NBD is None else [window_NBD, pool_NBD]
        for block in blocks:
            keys_MKD, seen_MQK = _keys(block, pages, places, q_THD.dtype)
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
            keys_MKD, seen_MQK = _keys(block, pages, ctx.places, dtype)
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


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows `first .. stop - 1`, all of one sequence, which see window positions low .. high and `entries` entries."""

    first: int
    stop: int
    low: int
    high: int
    entries: int

    def logits(self, heads: int) -> int:
        return (self.stop - self.first) * heads * (self.high - self.low + 1 + self.entries)


@dataclass(frozen=True, slots=True)
class _Block:
    """M parts, no two of one sequence, padded to Q rows, `width` window positions and `entries` entries.

    Padding of `rows_MQ` are rows of the part that come again; in `write_MQ` it is a row behind the last.
    """

    rows_MQ: torch.Tensor
    write_MQ: torch.Tensor
    low_M: torch.Tensor
    high_M: torch.Tensor
    entries_M: torch.Tensor
    width: int
    entries: int

    @classmethod
    def of(cls, parts: Sequence[_Part], device: torch.device) -> _Block:
        step = 1 if device.type == "cpu" else _ALIGNED
        width = max(part.high - part.low for part in parts) + 1
        numbers = [[part.first, part.stop, part.low, part.high, part.entries] for part in parts]
        first, stop, low, high, entries = torch.tensor(numbers, device=device).unbind(1)
        row_MQ = first[:, None] + torch.arange(max(part.stop - part.first for part in parts), device=device)
        return cls(
            rows_MQ=row_MQ.minimum(stop[:, None] - 1),
            write_MQ=torch.where(row_MQ < stop[:, None], row_MQ, -1),
            low_M=low,
            high_M=high,
            entries_M=entries,
            width=-(-width // step) * step,
            entries=-(-max(part.entries for part in parts) // step) * step,
        )

    def put(self, rows_TX: torch.Tensor, values_MQX: torch.Tensor) -> None:
        """Write the rows of all parts; padding goes to the last row."""
        place = self.write_MQ.remainder(len(rows_TX)).flatten()
        rows_TX.index_copy_(0, place, values_MQX.flatten(0, 1).to(rows_TX.dtype))

    def counts(self, num_pages: int) -> list[int]:
        """Keys from the window and, where there is one, from the pool."""
        return [self.width, self.entries][:num_pages]

    def sources(self, places: KeyRows, pages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Flat page rows [M, keys], window first; those that a part does not have are any."""
        seq_M, device = places.seq_T[self.rows_MQ[:, 0]], self.rows_MQ.device
        position = self.low_M[:, None] + torch.arange(self.width, device=device)
        rows = [flat_rows(places.window_table_SP, seq_M, position.minimum(self.high_M[:, None]), pages[0].shape[1])]
        if len(pages) > 1:
            assert places.pool_table_SP is not None
            entry = torch.arange(self.entries, device=device).minimum(self.entries_M[:, None] - 1).clamp(min=0)
            rows.append(flat_rows(places.pool_table_SP, seq_M, entry, pages[1].shape[1]))
        return [row.clamp(min=0) for row in rows]


def blocks_of(places: KeyRows, heads: int) -> Iterator[list[_Part]]:
    """All rows, as parts that are computed together; one read from the device.

    On a CPU every part is alone: padding costs there and launches do not. Sequences share no rows of pages, so sums
    into pages have no two terms for one place in a block, and a fixed order.
    """
    columns = [places.seq_T, places.lo_T, places.hi_T]
    columns.append(torch.zeros_like(places.lo_T) if places.visible_T is None else places.visible_T)
    rows_4T = torch.stack(columns).cpu()
    borders = [0, *((rows_4T[0].diff() != 0).nonzero()[:, 0] + 1).tolist(), rows_4T.shape[1]]
    limit = block_limit(places.seq_T.device)
    each = [list(_parts(rows_4T, *border, heads)) for border in pairwise(borders) if border[0] < border[1]]
    for at_once in zip_longest(*each):
        block: list[_Part] = []
        for part in sorted((part for part in at_once if part is not None), key=lambda part: -part.logits(heads)):
            if block and (len(block) + 1) * block[0].logits(heads) > limit:
                yield block
                block = []
            block.append(part)
        yield block


def block_limit(device: torch.device) -> int:
    """Logits that the parts of one block may have together; on a CPU each part is a block of its own."""
    return 0 if device.type == "cpu" else _LOGITS_OF_A_BLOCK


def _parts(rows_4T: torch.Tensor, start: int, end: int, heads: int) -> Iterator[_Part]:
    """Rows of one sequence, cut so that no part has too many rows or logits."""
    for first in range(start, end, _QUERIES_AT_ONCE):
        yield from _fitting(rows_4T, first, min(first + _QUERIES_AT_ONCE, end), heads)


def _fitting(rows_4T: torch.Tensor, first: int, stop: int, heads: int) -> Iterator[_Part]:
    _, lo, hi, visible = rows_4T[:, first:stop]
    sees = lo <= hi
    low, high = (int(lo[sees].min()), int(hi[sees].max())) if sees.any() else (0, 0)
    part = _Part(first, stop, low, high, max(int(visible.max()), 0))
    if stop - first == 1 or part.logits(heads) <= LOGITS_AT_ONCE:
        yield part
        return
    middle = (first + stop) // 2
    yield from _fitting(rows_4T, first, middle, heads)
    yield from _fitting(rows_4T, middle, stop, heads)


def _keys(
    block: _Block, pages: Sequence[torch.Tensor], places: KeyRows, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [M, K, D] of `dtype`, 0 where no row sees them, and which of its keys each row sees, bool [M, Q, K]."""
    rows, device = block.rows_MQ, block.rows_MQ.device
    sources = block.sources(places, pages)
    keys_MKD = torch.cat([page.flatten(0, 1)[source] for page, source in zip(pages, sources, strict=True)], dim=1)
    position = block.low_M[:, None, None] + torch.arange(block.width, device=device)
    seen = [(position >= places.lo_T[rows][..., None]) & (position <= places.hi_T[rows][..., None])]
    if len(pages) > 1:
        seen.append(_seen_entries(block, places))
    seen_MQK = torch.cat(seen, dim=2) & (block.write_MQ >= 0)[..., None]
    # memory that no row sees may hold anything, NaN included
    return keys_MKD.masked_fill(~seen_MQK.any(dim=1)[..., None], 0.0).to(dtype), seen_MQK


def _logits(q_MQHD: torch.Tensor, keys_MKD: torch.Tensor, seen_MQK: torch.Tensor, scale: float) -> torch.Tensor:
    """fp32 [M, Q, H, K], -inf where a row does not see a key."""
    logits = multiply(q_MQHD.flatten(1, 2), keys_MKD.mT).unflatten(1, q_MQHD.shape[1:3]) * scale
    return logits.masked_fill_(~seen_MQK[:, :, None], float("-inf"))


def _seen_entries(block: _Block, places: KeyRows) -> torch.Tensor:
    assert places.visible_T is not None
    rows = block.rows_MQ
    seen_MQP = torch.arange(block.entries, device=rows.device) < places.visible_T[rows][..., None]
    if places.picks_TX is None:
        return seen_MQP
    picks = places.picks_TX[rows].long()
    picked = torch.zeros(*rows.shape, block.entries + 1, dtype=torch.bool, device=rows.device)
    none = (picks < 0) | (picks >= block.entries)
    return seen_MQP & picked.scatter_(2, torch.where(none, block.entries, picks), True)[..., :-1]
