"""From sequences to one packed step: the pure host-side function behind every driver.

All index arithmetic of windows (spec v4 4.4, 6.1), compression groups (5.1, 5.2, 5.4) and pages happens here, once
per step, vectorised over all rows; layers only gather.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
class PackedSteps:
    """The rows of all sequences of a step, at least one each, one behind the other: `SequenceStep`s side by side.

    `table_SP` by group, padded with -1. `logit_rows_R` count from the first row of the step. `resumable` (sequence,
    position) pairs. What no sequence has is None. The last `lookahead` tokens of each may be taken back later.
    """

    ids_T: NDArray[np.int32]
    kinds_T: NDArray[np.int8]
    start_S: Ints
    stop_S: Ints
    table_SP: Mapping[str, NDArray[np.int32]]
    logit_rows_R: Ints
    resumable: Sequence[tuple[int, int]] = ()
    visible_T2: NDArray[np.int32] | None = None
    image_index_T: NDArray[np.int32] | None = None
    slot_S: Ints | None = None
    lookback_SL: NDArray[np.int32] | None = None
    lookahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """All rows of the step, packed: sequence, absolute position, and per sequence first row, start and stop
    position; `resumable` (sequence, position) pairs."""

    seq_T: Ints
    position_T: Ints
    first_S1: Ints
    start_S: Ints
    stop_S: Ints
    resumable: Sequence[tuple[int, int]]
    lookahead: int

    def before_stops(self, reach: int) -> NDArray[np.bool_] | None:
        """Rows among the last `reach` ones before the end of their sequence or a resumable position, bool [T].

        None = all of them: every sequence has one row.
        """
        if len(self.seq_T) == len(self.start_S):
            return None
        reach += self.lookahead
        kept_T = self.position_T >= self.stop_S[self.seq_T] - reach
        for seq, place in self.resumable:
            offset = self.first_S1[seq] - self.start_S[seq]
            kept_T[offset + max(self.start_S[seq], place - reach) : offset + place] = True
        return kept_T


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """Stacked page tables by group, and rows per page by group."""

    table_SP: Mapping[str, NDArray[np.int32]]
    page_rows: Mapping[str, int]

    def flat(self, group: str, seq: Ints, row: Ints) -> Ints:
        """Flat page row of logical row `row` of sequence `seq` (CacheView's rule)."""
        table, rows = self.table_SP[group], self.page_rows[group]
        if not len(seq):
            return seq
        width = table.shape[1]
        logical, offset = np.divmod(row, rows)
        page: Ints = table.reshape(-1).take(seq * width + logical % width).astype(np.int64)
        assert page.min() >= 0, f"a row of group {group} lies in a page that was never given or already taken back"
        return page * rows + offset


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
    return assemble_packed(pack(steps), text, page_rows, pages, device)


def assemble_packed(
    packed: PackedSteps,
    text: TextConfig,
    page_rows: Mapping[str, int],
    pages: Mapping[tuple[str, int], torch.Tensor],
    device: torch.device | str = "cpu",
) -> tuple[Batch, CacheView]:
    """`assemble` for a driver that has the rows of its sequences side by side already."""
    rows = _rows(packed)
    tables = _Tables(table_SP=packed.table_SP, page_rows=page_rows)
    place = torch.device(device)

    def put(array: NDArray[np.generic], dtype: type[np.integer[Any]] = np.int32) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array, dtype))
        return tensor if place.type == "cpu" else tensor.to(place)

    lo_T, hi_T = _window(packed, rows, text.sliding_window)
    compressors = {layer.compressor.ratio: layer.compressor for layer in text.layers if layer.compressor is not None}
    pools = {ratio: _pool(compressor, rows, tables) for ratio, compressor in compressors.items()}
    # what has one number per row goes to the device together
    narrow = [rows.position_T, rows.seq_T, lo_T, hi_T, *(pool.visible_T for pool in pools.values())]
    position_T, seq_T, lo, hi, *visible = put(np.array(narrow, np.int32)).unbind(0)
    wide = [tables.flat("window", rows.seq_T, rows.position_T), *(pool.phase_T for pool in pools.values())]
    wide += [pool.state_write_T for pool in pools.values() if pool.state_write_T is not None]
    window_write_T, *others = put(np.array(wide, np.int64), np.int64).unbind(0)
    phases, states = others[: len(pools)], iter(others[len(pools) :])
    image_index_T, slot_S = packed.image_index_T, packed.slot_S
    if image_index_T is not None and image_index_T.max() < 0:
        image_index_T = None
    batch = Batch(
        ids_T=put(packed.ids_T),
        kinds_T=put(packed.kinds_T, np.int8),
        positions_T=position_T,
        seq_T=seq_T,
        query_start_S=put(rows.first_S1),
        seq_len_S=put(rows.stop_S),
        window_lo_T=lo,
        window_hi_T=hi,
        window_width=int((hi_T - lo_T).max()) + 1,
        image_index_T=None if image_index_T is None else put(image_index_T),
        has_pictures=bool(packed.kinds_T.max() >= 0),
        logit_rows_R=put(packed.logit_rows_R, np.int64),
        slot_T=None if slot_S is None else put(slot_S[rows.seq_T]),
        lookback_SL=None if packed.lookback_SL is None else put(packed.lookback_SL),
    )
    longest = int(rows.stop_S.max())
    view = CacheView(
        pages=pages,
        table_SP={group: put(table) for group, table in tables.table_SP.items()},
        window_write_T=window_write_T,
        pools={
            ratio: PoolStep(
                ratio=ratio,
                sources_PB=put(pool.sources_PB),
                positions_P=put(pool.entry_P * ratio),
                write_P=put(pool.write_P, np.int64),
                phase_T=phase_T,
                state_write_T=None if pool.state_write_T is None else next(states),
                visible_T=visible_T,
                max_visible=longest // ratio,
            )
            for (ratio, pool), visible_T, phase_T in zip(pools.items(), visible, phases, strict=True)
        },
    )
    return batch, view


def pack(steps: Sequence[SequenceStep]) -> PackedSteps:
    """Put the sequences of a step one behind the other."""
    counts = [len(step.ids_n) for step in steps]
    start_S = np.array([step.start for step in steps], np.int64)
    first = accumulate(counts[:-1], initial=0)
    lookback = [step.lookback_L for step in steps if step.lookback_L is not None]
    return PackedSteps(
        ids_T=np.concatenate([step.ids_n for step in steps]),
        kinds_T=np.concatenate([step.kinds_n for step in steps]),
        start_S=start_S,
        stop_S=start_S + counts,
        table_SP={group: _stack([step.tables[group] for step in steps]) for group in steps[0].tables},
        logit_rows_R=np.array([f + row for f, s in zip(first, steps, strict=True) for row in s.logit_rows], np.int64),
        resumable=[(seq, place) for seq, step in enumerate(steps) for place in step.resumable],
        visible_T2=join_parts([step.visible_n2 for step in steps], counts, 0),
        image_index_T=join_parts([step.image_index_n for step in steps], counts, -1),
        slot_S=slots_of([step.slot for step in steps]),
        lookback_SL=np.stack(lookback) if lookback else None,
    )


def slots_of(slots: Sequence[int]) -> Ints | None:
    """Adapter slot of each sequence; None when no sequence has an adapter."""
    return np.array(slots, np.int64) if any(slots) else None


def join_parts(
    parts: Sequence[NDArray[np.int32] | None], counts: Sequence[int], absent: int
) -> NDArray[np.int32] | None:
    """Rows of all sequences, `absent` where a sequence has none; None when no sequence has any."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    shape = known[0].shape[1:]
    return np.concatenate(
        [np.full((n, *shape), absent, np.int32) if p is None else p for p, n in zip(parts, counts, strict=True)]
    )


def _rows(packed: PackedSteps) -> _Rows:
    start_S = packed.start_S
    first_S1 = np.arange(len(start_S) + 1)
    if len(packed.ids_T) == len(start_S):  # decoding: one row each
        seq_T, position_T = first_S1[:-1], start_S
    else:
        count_S = packed.stop_S - start_S
        seq_T = np.repeat(first_S1[:-1], count_S)
        first_S1[1:] = count_S.cumsum()
        position_T = np.arange(len(seq_T)) + (start_S - first_S1[:-1])[seq_T]
    return _Rows(
        seq_T=seq_T,
        position_T=position_T,
        first_S1=first_S1,
        start_S=start_S,
        stop_S=packed.stop_S,
        resumable=packed.resumable,
        lookahead=packed.lookahead,
    )


def _stack(tables: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Tables of different lengths as one array, padded with -1 (no page)."""
    out = np.full((len(tables), max(len(table) for table in tables)), -1, np.int32)
    for row, table in zip(out, tables, strict=True):
        row[: len(table)] = table
    return out


def _window(packed: PackedSteps, rows: _Rows, window: int) -> tuple[Ints, Ints]:
    """First and last window position each row sees: W - 1 back or to its span's start, right to its span's end."""
    if packed.visible_T2 is None:
        return np.maximum(rows.position_T - (window - 1), 0), rows.position_T
    left_T, right_T = packed.visible_T2.astype(np.int64).T
    hi_T = rows.position_T + right_T
    assert (hi_T < rows.stop_S[rows.seq_T]).all(), "a chunk ends inside a span; the scheduler must not cut there"
    return np.maximum(rows.position_T - np.maximum(left_T, window - 1), 0), hi_T


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    phase_T: Ints
    visible_T: Ints
    sources_PB: Ints
    entry_P: Ints
    write_P: Ints
    state_write_T: Ints | None


def _pool(compressor: CompressorPlan, rows: _Rows, tables: _Tables) -> _Pool:
    """Entries that close in this step, the un-pooled rows they read, and which rows must be kept for later groups."""
    ratio = compressor.ratio
    open_T, phase_T = np.divmod(rows.position_T, ratio)
    closes_T = phase_T == ratio - 1
    row_P = closes_T.nonzero()[0]
    seq_P, entry_P = rows.seq_T[row_P], open_T[row_P]
    return _Pool(
        phase_T=phase_T,
        visible_T=open_T + closes_T,
        sources_PB=_sources(compressor, rows, tables, seq_P, entry_P),
        entry_P=entry_P,
        write_P=tables.flat(f"pool{ratio}", seq_P, entry_P),
        state_write_T=_state_writes(compressor, rows, tables) if compressor.gated else None,
    )


def _sources(compressor: CompressorPlan, rows: _Rows, tables: _Tables, seq_P: Ints, entry_P: Ints) -> Ints:
    """`PoolStep.sources_PB`."""
    ratio, reach = compressor.ratio, compressor.group_rows
    if not len(seq_P):
        return np.empty((0, reach), np.int64)
    token_PB = (entry_P[:, None] + 1) * ratio - reach + np.arange(reach)
    start_P1 = rows.start_S[seq_P][:, None]
    earlier_PB = token_PB < start_P1
    sources_PB = np.where(earlier_PB, -1, token_PB - start_P1 + rows.first_S1[seq_P][:, None])
    if compressor.gated:
        carried = earlier_PB & (token_PB >= 0)
        seq_PB = np.broadcast_to(seq_P[:, None], token_PB.shape)
        sources_PB[carried] = -2 - tables.flat(f"state{ratio}", seq_PB[carried], token_PB[carried])
    else:
        assert not earlier_PB.any(), "a compressor without state cannot read rows of an earlier step"
    return sources_PB


def _state_writes(compressor: CompressorPlan, rows: _Rows, tables: _Tables) -> Ints:
    """`PoolStep.state_write_T`."""
    group, kept_T = f"state{compressor.ratio}", rows.before_stops(compressor.group_rows)
    if kept_T is None:
        return tables.flat(group, rows.seq_T, rows.position_T)
    state_write_T = np.full(len(kept_T), -1, np.int64)
    state_write_T[kept_T] = tables.flat(group, rows.seq_T[kept_T], rows.position_T[kept_T])
    return state_write_T
