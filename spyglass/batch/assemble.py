"""From sequences to one packed step: the pure host-side function behind every driver.

All index arithmetic of windows (spec v4 4.4, 6.1), compression groups (5.1, 5.2, 5.4) and pages happens here, once
per step, vectorised over all rows; layers only gather.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.batch.types import Batch, CacheView, PoolStep
from spyglass.config.model import CompressorPlan, TextConfig

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStep:
    """The rows [start, start + n) of one sequence in this step.

    `ids_n` (-1 at pictures), `kinds_n` TokenKind, `visible_n2` extra keys left and right (Prompt.visible_T2),
    `image_index_n` row of this step's image rows or -1. `lookback_L` as a row of Batch.lookback_SL. `tables` hold the
    page of every logical page of each group, long enough for the rows after this step. `logit_rows` are offsets into
    0..n-1. `resumable` positions in (start, start + n]: un-pooled rows before each of them are kept too, so that what
    is in memory after the step suffices to go on from there.
    """

    ids_n: NDArray[np.int32]
    kinds_n: NDArray[np.int8]
    start: int
    tables: Mapping[str, NDArray[np.int32]]
    logit_rows: Sequence[int]
    visible_n2: NDArray[np.int32] | None = None
    image_index_n: NDArray[np.int32] | None = None
    slot: int = 0
    lookback_L: NDArray[np.int32] | None = None
    resumable: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """All rows of the step, packed: sequence, absolute position, and per sequence first row, start and stop
    position; `resumable` (sequence, position) pairs."""

    seq_T: Ints
    position_T: Ints
    first_S: Ints
    start_S: Ints
    stop_S: Ints
    resumable: Sequence[tuple[int, int]]

    def before_stops(self, reach: int) -> NDArray[np.bool_]:
        """Rows among the last `reach` ones before the end of their sequence or a resumable position, bool [T]."""
        kept_T = self.position_T >= self.stop_S[self.seq_T] - reach
        for seq, place in self.resumable:
            offset = self.first_S[seq] - self.start_S[seq]
            kept_T[offset + max(self.start_S[seq], place - reach) : offset + place] = True
        return kept_T


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """Stacked page tables by group, and rows per page by group."""

    table_SP: dict[str, NDArray[np.int32]] = field(default_factory=dict)
    page_rows: Mapping[str, int]

    def flat(self, group: str, seq: Ints, row: Ints) -> Ints:
        """Flat page row of logical row `row` of sequence `seq` (CacheView's rule)."""
        table, rows = self.table_SP[group], self.page_rows[group]
        page = table[seq, (row // rows) % max(1, table.shape[1])].astype(np.int64)
        assert (page >= 0).all(), f"a row of group {group} lies in a page that was never given or already taken back"
        return page * rows + row % rows


def assemble(
    steps: Sequence[SequenceStep],
    text: TextConfig,
    page_rows: Mapping[str, int],
    pages: Mapping[tuple[str, int], torch.Tensor],
    device: torch.device | str = "cpu",
) -> tuple[Batch, CacheView]:
    """One step of `steps` as (Batch, CacheView); tensors on `device`, widths and maxima on the host.

    `pages[kind, layer]` [num_pages, page_rows, row_dim] are passed through; `page_rows` gives the rows per page by
    group.
    """
    rows = _pack(steps)
    tables = _Tables(page_rows=page_rows)
    for group in steps[0].tables if steps else ():
        tables.table_SP[group] = _stack([step.tables[group] for step in steps])

    place = torch.device(device)

    def put(array: NDArray[np.generic], dtype: type[np.integer[Any]] = np.int32) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array, dtype))
        return tensor if place.type == "cpu" else tensor.to(place)

    kinds_T = np.concatenate([step.kinds_n for step in steps])
    lo_T, hi_T = _window(steps, rows, text.sliding_window)
    image_index_T = _image_index(steps, rows)
    logit_rows = [first + row for first, s in zip(rows.first_S.tolist(), steps, strict=True) for row in s.logit_rows]
    slot_T = np.repeat([step.slot for step in steps], rows.stop_S - rows.start_S)
    lookback = [step.lookback_L for step in steps if step.lookback_L is not None]
    batch = Batch(
        ids_T=put(np.concatenate([step.ids_n for step in steps])),
        kinds_T=put(kinds_T, np.int8),
        positions_T=put(rows.position_T),
        seq_T=put(rows.seq_T),
        query_start_S=put(np.append(rows.first_S, len(rows.seq_T))),
        seq_len_S=put(rows.stop_S),
        window_lo_T=put(lo_T),
        window_hi_T=put(hi_T),
        window_width=int((hi_T - lo_T).max()) + 1,
        image_index_T=None if image_index_T is None else put(image_index_T),
        has_pictures=bool((kinds_T >= 0).any()),
        logit_rows_R=put(np.array(logit_rows, np.int64), np.int64),
        slot_T=put(slot_T) if slot_T.any() else None,
        lookback_SL=put(np.stack(lookback)) if lookback else None,
    )
    compressors = {layer.compressor.ratio: layer.compressor for layer in text.layers if layer.compressor is not None}
    pools = {}
    for ratio, compressor in compressors.items():
        step = _pool(compressor, rows, tables)
        pools[ratio] = PoolStep(
            ratio=ratio,
            sources_PB=put(step.sources_PB),
            positions_P=put(step.entry_P * ratio),
            write_P=put(step.write_P, np.int64),
            phase_T=put(rows.position_T % ratio, np.int64),
            state_write_T=None if step.state_write_T is None else put(step.state_write_T, np.int64),
            visible_T=put((rows.position_T + 1) // ratio),
            max_visible=int(((rows.stop_S) // ratio).max()),
        )
    view = CacheView(
        pages=pages,
        table_SP={group: put(table) for group, table in tables.table_SP.items()},
        window_write_T=put(tables.flat("window", rows.seq_T, rows.position_T), np.int64),
        pools=pools,
    )
    return batch, view


def _pack(steps: Sequence[SequenceStep]) -> _Rows:
    count_S = np.array([len(step.ids_n) for step in steps], np.int64)
    start_S = np.array([step.start for step in steps], np.int64)
    first_S = np.cumsum(count_S) - count_S
    seq_T = np.repeat(np.arange(len(steps)), count_S)
    position_T = np.arange(count_S.sum()) - first_S[seq_T] + start_S[seq_T]
    return _Rows(
        seq_T=seq_T,
        position_T=position_T,
        first_S=first_S,
        start_S=start_S,
        stop_S=start_S + count_S,
        resumable=[(seq, place) for seq, step in enumerate(steps) for place in step.resumable],
    )


def _stack(tables: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Tables of different lengths as one array, padded with -1 (no page)."""
    if len({len(table) for table in tables}) == 1:
        return np.concatenate(tables).reshape(len(tables), -1)
    out = np.full((len(tables), max(len(table) for table in tables)), -1, np.int32)
    for row, table in zip(out, tables, strict=True):
        row[: len(table)] = table
    return out


def _image_index(steps: Sequence[SequenceStep], rows: _Rows) -> Ints | None:
    """Row of the step's image rows of every position, -1 = none; None when no position has one."""
    image_index_T = np.full(len(rows.seq_T), -1, np.int64)
    for step, first in zip(steps, rows.first_S, strict=True):
        if step.image_index_n is not None:
            image_index_T[first : first + len(step.image_index_n)] = step.image_index_n
    return image_index_T if (image_index_T >= 0).any() else None


def _window(steps: Sequence[SequenceStep], rows: _Rows, window: int) -> tuple[Ints, Ints]:
    """First and last window position each row sees: W - 1 back or to its span's start, right to its span's end."""
    if all(step.visible_n2 is None for step in steps):
        return np.maximum(rows.position_T - (window - 1), 0), rows.position_T
    none = [np.zeros((len(s.ids_n), 2), np.int32) if s.visible_n2 is None else s.visible_n2 for s in steps]
    left_T, right_T = np.concatenate(none).astype(np.int64).T
    hi_T = rows.position_T + right_T
    assert (hi_T < rows.stop_S[rows.seq_T]).all(), "a chunk ends inside a span; the scheduler must not cut there"
    return np.maximum(rows.position_T - np.maximum(left_T, window - 1), 0), hi_T


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    sources_PB: Ints
    entry_P: Ints
    write_P: Ints
    state_write_T: Ints | None


def _pool(compressor: CompressorPlan, rows: _Rows, tables: _Tables) -> _Pool:
    """Entries that close in this step, the un-pooled rows they read, and which rows must be kept for later groups."""
    ratio, reach = compressor.ratio, compressor.group_rows
    count_S = rows.stop_S // ratio - rows.start_S // ratio
    seq_P = np.repeat(np.arange(len(count_S)), count_S)
    entry_P = np.arange(count_S.sum()) - (np.cumsum(count_S) - count_S)[seq_P] + (rows.start_S // ratio)[seq_P]
    token_PB = (entry_P[:, None] + 1) * ratio - reach + np.arange(reach)
    start_P1 = rows.start_S[seq_P][:, None]
    sources_PB = np.where(token_PB >= start_P1, token_PB - start_P1 + rows.first_S[seq_P][:, None], -1)
    state_write_T = None
    if compressor.gated:
        carried = (token_PB >= 0) & (token_PB < start_P1)
        seq_PB = np.broadcast_to(seq_P[:, None], token_PB.shape)
        group = f"state{ratio}"
        sources_PB[carried] = -2 - tables.flat(group, seq_PB[carried], token_PB[carried])
        kept = rows.before_stops(reach)
        state_write_T = np.full(len(kept), -1, np.int64)
        state_write_T[kept] = tables.flat(group, rows.seq_T[kept], rows.position_T[kept])
    else:
        assert (token_PB >= start_P1).all(), "a compressor without state cannot read rows of an earlier step"
    return _Pool(
        sources_PB=sources_PB,
        entry_P=entry_P,
        write_P=tables.flat(f"pool{ratio}", seq_P, entry_P),
        state_write_T=state_write_T,
    )
