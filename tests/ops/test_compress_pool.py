"""The defining pooling op against float64, term by term; rows that are not asked for hold NaN (spec v4 5.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spyglass.ops.compress_pool.reference import compress_pool
from tests.tolerance import OP_FLOAT32, assert_close

NAN = float("nan")


def formula(rows: Any, state: Any, sources: Any, overlap: bool) -> np.ndarray:
    """One entry, one source, one channel at a time."""
    width = rows.shape[1] // (4 if overlap else 2)
    out = np.zeros((len(sources), width))
    for p, entry in enumerate(sources):
        for channel in range(width):
            total, weight = 0.0, 0.0
            for b, source in enumerate(entry):
                if source == -1:
                    continue
                row = rows[source] if source >= 0 else state[-(source + 2)]
                half = row.shape[0] // 2
                column = channel + (width if overlap and b >= len(entry) // 2 else 0)
                share = np.exp(row[half + column])
                total, weight = total + share * row[column], weight + share
            out[p, channel] = total / weight
    return out


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("width", [1, 5, 32])
def test_it_is_its_formula_over_new_carried_and_absent_rows(overlap: bool, width: int) -> None:
    rows = torch.randn(7, width * (4 if overlap else 2))
    state = torch.randn(2, 3, width * (4 if overlap else 2))
    sources = torch.tensor([[-1, -1, 0, 1], [-4, -7, 2, 6], [3, 4, 5, 0]], dtype=torch.int32)
    flat = state.flatten(0, 1)
    expected = formula(rows.double().numpy(), flat.double().numpy(), sources.tolist(), overlap)
    assert_close(compress_pool(rows, flat, sources, overlap=overlap), expected, OP_FLOAT32)


def test_rows_that_no_source_names_may_hold_anything() -> None:
    rows, state = torch.randn(6, 8), torch.randn(5, 8)
    rows[[0, 5]], state[[0, 1, 4]] = NAN, NAN
    sources = torch.tensor([[-1, -1, 1, 2], [-4, -5, 3, 4]], dtype=torch.int32)
    assert torch.isfinite(compress_pool(rows, state, sources, overlap=False)).all()
    assert torch.isfinite(compress_pool(rows, state, sources, overlap=True)).all()


def test_equal_gates_give_the_mean_and_a_big_one_selects() -> None:
    rows = torch.cat([torch.randn(4, 3), torch.zeros(4, 3)], dim=1)
    sources = torch.arange(4, dtype=torch.int32)[None]
    assert_close(compress_pool(rows, None, sources, overlap=False)[0], rows[:, :3].mean(dim=0), OP_FLOAT32)
    rows[2, 4] = 60.0  # gate of channel 1
    got = compress_pool(rows, None, sources, overlap=False)[0]
    assert got[1] == pytest.approx(float(rows[2, 1]), abs=1e-6)
    assert got[0] == pytest.approx(float(rows[:, 0].mean()), abs=1e-6), "each channel has its own softmax"


def test_overlap_reads_the_first_columns_of_the_group_before_and_the_last_of_its_own() -> None:
    rows = torch.zeros(4, 8)
    rows[:2, 0:2], rows[:2, 2:4] = 10.0, -1.0
    rows[2:, 0:2], rows[2:, 2:4] = -1.0, 20.0
    sources = torch.arange(4, dtype=torch.int32)[None]
    assert_close(compress_pool(rows, None, sources, overlap=True), [[15.0, 15.0]], OP_FLOAT32)


def test_the_first_group_has_nothing_before_it() -> None:
    rows = torch.randn(4, 12)
    with_absent = torch.tensor([[-1, -1, -1, -1, 0, 1, 2, 3]], dtype=torch.int32)
    own = torch.cat([rows[:, 3:6], rows[:, 9:12]], dim=1)
    alone = compress_pool(own, None, torch.arange(4, dtype=torch.int32)[None], overlap=False)
    assert_close(compress_pool(rows, None, with_absent, overlap=True), alone, OP_FLOAT32)


def test_no_entry_and_no_new_row_are_fine() -> None:
    rows = torch.randn(3, 8)
    assert compress_pool(rows, None, torch.empty(0, 4, dtype=torch.int32), overlap=False).shape == (0, 4)
    state = torch.randn(4, 8)
    carried = torch.tensor([[-2, -3, -4, -5]], dtype=torch.int32)
    expected = compress_pool(state, None, torch.arange(4, dtype=torch.int32)[None], overlap=False)
    assert_close(compress_pool(rows[:0], state, carried, overlap=False), expected, OP_FLOAT32)


def test_big_gates_do_not_overflow() -> None:
    rows = torch.cat([torch.randn(4, 2), torch.full((4, 2), 300.0)], dim=1)
    got = compress_pool(rows, None, torch.arange(4, dtype=torch.int32)[None], overlap=False)
    assert_close(got[0], rows[:, :2].mean(dim=0), OP_FLOAT32)
