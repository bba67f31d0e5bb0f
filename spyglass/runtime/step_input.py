"""What a step is made of before anything is laid out: rows of some sequences, on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """The rows of all sequences of a step, at least one each, one sequence behind the other, on the host.

    `ids_T` int32 (-1 at images), `kinds_T` TokenKind. Rows [start_S, stop_S) of each sequence. `table_SP` int32 by
    group: the page of every logical page, long enough for the rows after this step, padded with -1. `logit_rows_R`
    count from the first row of the step. `resumable` (sequence, position) pairs: un-compressed rows before each
    position are kept too, so that what is in memory after the step suffices to go on from there. `visible_T2` extra
    keys left and right (`Prompt.visible_T2`); `image_index_T` int32 row of this step's image rows or -1. What no
    sequence has is None. The last `lookahead` tokens of each sequence may be taken back later.
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
    adapter_S: Ints | None = None
    lookahead: int = 0


def sequence_input(
    ids_T: NDArray[np.int32],
    kinds_T: NDArray[np.int8],
    start: int,
    tables: Mapping[str, NDArray[np.int32]],
    logit_rows: Sequence[int] | NDArray[np.int64],
    *,
    visible_T2: NDArray[np.int32] | None = None,
    image_index_T: NDArray[np.int32] | None = None,
    adapter_id: int = 0,
    resumable: Sequence[int] = (),
) -> StepInput:
    """A step of one sequence, rows from position `start` on; `tables` [P] by group, `logit_rows` from its first row."""
    return StepInput(
        ids_T=ids_T,
        kinds_T=kinds_T,
        start_S=np.array([start], np.int64),
        stop_S=np.array([start + len(ids_T)], np.int64),
        table_SP={group: table[None] for group, table in tables.items()},
        logit_rows_R=np.asarray(logit_rows, np.int64),
        resumable=[(0, position) for position in resumable],
        visible_T2=visible_T2,
        image_index_T=image_index_T,
        adapter_S=adapters_of([adapter_id]),
    )


def join_inputs(steps: Sequence[StepInput]) -> StepInput:
    """The sequences of several steps as one step; image rows are counted over all of them already."""
    counts = [len(step.ids_T) for step in steps]
    sequences = [len(step.start_S) for step in steps]
    first = np.cumsum([0, *counts])
    first_sequence = np.cumsum([0, *sequences])
    adapter_ids = [
        adapter_id
        for s, n in zip(steps, sequences, strict=True)
        for adapter_id in (s.adapter_S if s.adapter_S is not None else [0] * n)
    ]
    return StepInput(
        ids_T=np.concatenate([step.ids_T for step in steps]),
        kinds_T=np.concatenate([step.kinds_T for step in steps]),
        start_S=np.concatenate([step.start_S for step in steps]),
        stop_S=np.concatenate([step.stop_S for step in steps]),
        table_SP={group: _stack([step.table_SP[group] for step in steps]) for group in steps[0].table_SP},
        logit_rows_R=np.concatenate([step.logit_rows_R + at for step, at in zip(steps, first, strict=False)]),
        resumable=[(int(n) + q, p) for step, n in zip(steps, first_sequence, strict=False) for q, p in step.resumable],
        visible_T2=join_parts([step.visible_T2 for step in steps], counts, 0),
        image_index_T=join_parts([step.image_index_T for step in steps], counts, -1),
        adapter_S=adapters_of(adapter_ids),
    )


def adapters_of(adapter_ids: Sequence[int]) -> Ints | None:
    """Adapter of each sequence; None when no sequence has an adapter."""
    return np.array(adapter_ids, np.int64) if any(adapter_ids) else None


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


def _stack(tables: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Tables [S, P] of different widths below one another, padded with -1 (no page)."""
    width = max(table.shape[1] for table in tables)
    return np.concatenate([np.pad(t, ((0, 0), (0, width - t.shape[1])), constant_values=-1) for t in tables])
