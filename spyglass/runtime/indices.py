"""All index arithmetic of windows (spec v4 4.4, 6.1), compression groups (5.1, 5.2, 5.4) and pages.

Once per step, vectorised over all rows; layers only gather.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spyglass.config.model import CompressorPlan, TextConfig
from spyglass.runtime.step_input import Ints, StepInput

StepValues = dict[str, NDArray[Any]]


def compressors_of(text: TextConfig) -> dict[int, CompressorPlan]:
    """One plan for each compression ratio."""
    return {layer.compressor.ratio: layer.compressor for layer in text.layers if layer.compressor is not None}


def step_values(step: StepInput, text: TextConfig, page_rows: Mapping[str, int]) -> StepValues:
    """The tensors of `Batch` and `CacheView` by name, those of a ratio or page table with it behind a space."""
    rows = _rows(step)
    tables = _Tables(table_SP=step.table_SP, page_rows=page_rows)
    lo_T, hi_T = _window(step, rows, text.sliding_window)
    values: StepValues = {
        "ids_T": step.ids_T,
        "kinds_T": step.kinds_T,
        "positions_T": rows.position_T,
        "seq_T": rows.seq_T,
        "window_lo_T": lo_T,
        "window_hi_T": hi_T,
        "window_write_T": tables.flat("window", rows.seq_T, rows.position_T),
        "logit_rows_R": step.logit_rows_R,
    }
    if step.image_index_T is not None:
        values["image_index_T"] = step.image_index_T
    if step.adapter_S is not None:
        values["adapter_T"] = step.adapter_S[rows.seq_T]
    for compressor in compressors_of(text).values():
        values |= _compression(compressor, rows, tables)
    return values | {f"table {group}": table for group, table in step.table_SP.items()}


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


def _rows(packed: StepInput) -> _Rows:
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


def _window(packed: StepInput, rows: _Rows, window: int) -> tuple[Ints, Ints]:
    """First and last window position each row sees: W - 1 back or to its span's start, right to its span's end."""
    if packed.visible_T2 is None:
        return np.maximum(rows.position_T - (window - 1), 0), rows.position_T
    left_T, right_T = packed.visible_T2.astype(np.int64).T
    hi_T = rows.position_T + right_T
    assert (hi_T < rows.stop_S[rows.seq_T]).all(), "a chunk ends inside a span; the scheduler must not cut there"
    return np.maximum(rows.position_T - np.maximum(left_T, window - 1), 0), hi_T


def _compression(compressor: CompressorPlan, rows: _Rows, tables: _Tables) -> StepValues:
    """Groups that close in this step, the rows they read, and which rows must be kept for later groups."""
    ratio = compressor.ratio
    open_T, phase_T = np.divmod(rows.position_T, ratio)
    closes_T = phase_T == ratio - 1
    row_P = closes_T.nonzero()[0]
    seq_P, entry_P = rows.seq_T[row_P], open_T[row_P]
    values = {
        f"sources_PB {ratio}": _sources(compressor, rows, tables, seq_P, entry_P),
        f"positions_P {ratio}": entry_P * ratio,
        f"write_P {ratio}": tables.flat(f"pool{ratio}", seq_P, entry_P),
        f"phase_T {ratio}": phase_T,
        f"visible_T {ratio}": open_T + closes_T,
    }
    if compressor.gated:
        values[f"state_write_T {ratio}"] = _state_writes(compressor, rows, tables)
    return values


def _sources(compressor: CompressorPlan, rows: _Rows, tables: _Tables, seq_P: Ints, entry_P: Ints) -> Ints:
    """`CompressionStep.sources_PB`."""
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
    """`CompressionStep.state_write_T`."""
    group, kept_T = f"state{compressor.ratio}", rows.before_stops(compressor.group_rows)
    if kept_T is None:
        return tables.flat(group, rows.seq_T, rows.position_T)
    state_write_T = np.full(len(kept_T), -1, np.int64)
    state_write_T[kept_T] = tables.flat(group, rows.seq_T[kept_T], rows.position_T[kept_T])
    return state_write_T
