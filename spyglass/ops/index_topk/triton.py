"""Two launches whatever the context: scores to scratch, then an exact choice by one program per row.

Lengths are read on the device; grids and scratch follow from `max_visible`, so a graph can hold both launches. Rows of
a pool never wrap around. `blocks_TY` must be ascending without repeats, -1 last, as `index_blocks` lists them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spyglass.ops import stored, tuned
from spyglass.ops.gpu import overlap, processors, usable
from spyglass.ops.index_topk import reference
from spyglass.quant.formats import StoredRow

__all__ = ["index_topk", "score", "select", "suits", "usable"]

_SCORES_AT_ONCE = 1 << 26
_SHORT, _LONG = 1024, 4096  # candidates that one program reads at once
_GROUPED, _LARGE = 4096, 16384  # rows longer than that are looked at in groups, in not many more than this
_MOST, _MOST_TOPK = 1 << 20, 2048
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How scores are cut: rows of a program, keys of a tile, programs a processor, and Triton's two knobs."""

    rows: int
    keys: int
    programs: int
    warps: int
    stages: int


def index_topk(
    q_TNI: torch.Tensor,
    weights_TN: torch.Tensor,
    keys_NBI: torch.Tensor,
    table_SP: torch.Tensor,
    seq_T: torch.Tensor,
    visible_T: torch.Tensor,
    *,
    k: int,
    max_visible: int,
    stepwise: bool,
    weight_scale: float = 1.0,
    blocks_TY: torch.Tensor | None = None,
    block_size: int = 0,
    key_format: StoredRow | None = None,
    how: Scoring | None = None,
) -> torch.Tensor:
    """See `reference.py`, which also serves a k beyond 2,048 and more than 1,048,576 entries.

    Raises:
        DeviceError: keys are bytes of no format.
    """
    inputs = (q_TNI, weights_TN, keys_NBI, table_SP, seq_T, visible_T)
    if not suits(q_TNI, keys_NBI, max_visible, key_format) or k > _MOST_TOPK:
        return reference.index_topk(
            *inputs,
            k=k,
            max_visible=max_visible,
            stepwise=stepwise,
            weight_scale=weight_scale,
            blocks_TY=blocks_TY,
            block_size=block_size,
            key_format=key_format,
        )
    row = stored.row_code("index_topk", keys_NBI, key_format)
    width = min(k, max_visible)
    topk_indices_TX = torch.empty(len(q_TNI), width, dtype=torch.int32, device=q_TNI.device)
    few = k if blocks_TY is None else 0
    candidates = max_visible if blocks_TY is None else blocks_TY.shape[1] * block_size
    group = group_of(candidates)
    step = max(16, _SCORES_AT_ONCE // candidates & -16)  # parts begin at a multiple of 16 bytes, as Triton asks
    how = how or scoring(q_TNI, blocks_TY is not None)  # one for all parts, however few rows the last has
    for t in range(0, len(q_TNI), step):
        part = slice(t, t + step)
        blocks = None if blocks_TY is None else blocks_TY[part]
        rows = (q_TNI[part], weights_TN[part], keys_NBI, table_SP, seq_T[part], visible_T[part])
        scores, groups = score(rows, candidates, stepwise, weight_scale, few, blocks, block_size, group, True, how, row)
        select(scores, groups, visible_T[part], topk_indices_TX[part], k, blocks, block_size, group)
    return topk_indices_TX


def group_of(candidates: int) -> int:
    """Neighbours of which only the best is looked at first; 0 for short rows."""
    return max(8, 1 << (-(-candidates // _LARGE) - 1).bit_length()) if candidates > _GROUPED else 0


def suits(q_TNI: torch.Tensor, keys_NBI: torch.Tensor, max_visible: int, key_format: StoredRow | None = None) -> bool:
    """Whether the kernels take these rows."""
    return (
        q_TNI.dtype in _DTYPES
        and stored.suits(keys_NBI, key_format, q_TNI.dtype)
        and q_TNI.numel() > 0
        and 0 < max_visible <= _MOST
    )


def score(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    candidates: int,
    stepwise: bool,
    weight_scale: float,
    few: int,
    blocks_TY: torch.Tensor | None,
    block_size: int,
    group: int,
    all_scores: bool,
    how: Scoring,
    row: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scratch with scores [T, candidates] and the best of every `group` of them; what was not asked for is empty.
    `row`: how keys are stored (`stored.row_code`)."""
    from spyglass.ops.index_topk.triton_kernel import score_entries

    q_TNI, weights_TN, keys_NBI, table_SP, seq_T, visible_T = rows
    num_rows, heads, dim = q_TNI.shape
    dtype = q_TNI.dtype if stepwise else torch.float32
    padded = -(-candidates // 16) * 16
    scores = torch.empty(num_rows, padded if all_scores else 0, dtype=dtype, device=q_TNI.device)
    groups = torch.empty(num_rows, -(-padded // group) if group else 0, dtype=dtype, device=q_TNI.device)
    heads_padded = max(16, 1 << (heads - 1).bit_length())
    keys = max(how.keys, group)
    tiles, programs = -(-candidates // keys), -(-num_rows // how.rows)
    shares = max(1, min(tiles, -(-how.programs * processors(q_TNI.device) // programs)))
    score_entries[(programs * shares,)](
        q_TNI.contiguous(),
        weights_TN.contiguous(),
        keys_NBI,
        table_SP,
        seq_T,
        visible_T,
        seq_T if blocks_TY is None else blocks_TY.contiguous(),
        scores,
        groups,
        weight_scale,
        num_rows,
        table_SP.shape[1],
        0 if blocks_TY is None else blocks_TY.shape[1],
        scores.shape[1],
        groups.shape[1],
        few,
        shares,
        NUM_HEADS=heads,
        HEADS=heads_padded,
        DIM=dim,
        DIMS=max(16, 1 << (dim - 1).bit_length()),
        PAGE=keys_NBI.shape[1],
        ROW=row,
        BLOCK=0 if blocks_TY is None else block_size,
        GROUP=group,
        SCORES=all_scores,
        STEPWISE=stepwise and dtype != torch.float32,
        ROWS=how.rows,
        KEYS=keys,
        STAGES=how.stages,
        num_warps=how.warps,
        num_stages=how.stages,
        **overlap(q_TNI),
    )
    return scores, groups


def shape_key(q_TNI: torch.Tensor, listed: bool) -> dict[str, object]:
    """What a table knows index scores by."""
    dtype = str(q_TNI.dtype).removeprefix("torch.")
    return {"dtype": dtype, "heads": q_TNI.shape[1], "dim": q_TNI.shape[2], "listed": int(listed)}


def scoring(q_TNI: torch.Tensor, listed: bool) -> Scoring:
    """The cut for rows of this kind: many rows are of few sequences, and two of them share the keys they read."""
    num_rows, value_bytes = len(q_TNI), q_TNI.element_size()
    found = tuned.find("index_topk", (Scoring,), num_rows, **shape_key(q_TNI, listed))
    if found is not None:
        return found
    if value_bytes > 2 or num_rows <= 256 or listed:
        return Scoring(rows=1, keys=64, programs=4, warps=4, stages=2)
    return Scoring(rows=2, keys=128, programs=4, warps=8, stages=2)


def select(
    scores: torch.Tensor,
    groups: torch.Tensor,
    visible_T: torch.Tensor,
    topk_indices_TX: torch.Tensor,
    k: int,
    blocks_TY: torch.Tensor | None = None,
    block_size: int = 0,
    group: int = 0,
    unit: int = 1,
    pinned: bool = False,
) -> None:
    """Write the choice among `scores`; `unit` entries make one of them."""
    from spyglass.ops.index_topk.triton_kernel import select_entries

    candidates = scores.shape[1]
    short = min(_SHORT, max(32, 1 << (candidates - 1).bit_length()))
    spare = 1 << (2 * k - 1).bit_length() if group else 0
    select_entries[(len(topk_indices_TX),)](
        scores,
        groups,
        visible_T,
        visible_T if blocks_TY is None else blocks_TY.contiguous(),
        torch.empty(len(topk_indices_TX), spare, dtype=torch.int32, device=topk_indices_TX.device),
        topk_indices_TX,
        0 if blocks_TY is None else blocks_TY.shape[1],
        scores.shape[1],
        groups.shape[1],
        k,
        topk_indices_TX.shape[1],
        UNIT=unit,
        PINNED=pinned,
        BLOCK=0 if blocks_TY is None else block_size,
        GROUP=group,
        BITS=16 if scores.dtype == torch.bfloat16 else 32,
        SHORT=short,
        LONG=_LONG,
        SPARE=spare,
        num_warps=4 if candidates <= 256 else 16,
        **overlap(scores),
    )
