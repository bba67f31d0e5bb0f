"""Rows of packed sequences as dense blocks: neighbouring queries share one block of keys, under a mask.

A part is some rows of one sequence; its keys are all window positions and entries that any of them sees. Parts of
different sequences are padded to one block and computed together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import torch

from spyglass.ops.sparse_attention.reference import flat_rows

LOGITS_AT_ONCE = 1 << 25  # of a part
_LOGITS_OF_A_BLOCK = 1 << 26
_QUERIES_AT_ONCE = {"cpu": 256, "cuda": 64}  # fewer see fewer keys in vain, and are more parts
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
    topk_indices_TX: torch.Tensor | None


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
class Block:
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
    def of(cls, parts: Sequence[_Part], device: torch.device) -> Block:
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
    rows = _QUERIES_AT_ONCE[places.seq_T.device.type]
    each = [list(_parts(rows_4T, *border, heads, rows)) for border in pairwise(borders) if border[0] < border[1]]
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


def _parts(rows_4T: torch.Tensor, start: int, end: int, heads: int, at_once: int) -> Iterator[_Part]:
    """Rows of one sequence, cut so that no part has too many rows or logits."""
    for first in range(start, end, at_once):
        yield from _fitting(rows_4T, first, min(first + at_once, end), heads)


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


def keys_of(
    block: Block, pages: Sequence[torch.Tensor], places: KeyRows, dtype: torch.dtype
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


def _seen_entries(block: Block, places: KeyRows) -> torch.Tensor:
    assert places.visible_T is not None
    rows = block.rows_MQ
    seen_MQP = torch.arange(block.entries, device=rows.device) < places.visible_T[rows][..., None]
    if places.topk_indices_TX is None:
        return seen_MQP
    topk_indices = places.topk_indices_TX[rows].long()
    picked = torch.zeros(*rows.shape, block.entries + 1, dtype=torch.bool, device=rows.device)
    none = (topk_indices < 0) | (topk_indices >= block.entries)
    return seen_MQP & picked.scatter_(2, torch.where(none, block.entries, topk_indices), True)[..., :-1]
