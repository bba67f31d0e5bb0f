"""The comparison that every numerical test leans on notices what it must."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.tolerance import LAW_OF_MAX, Tolerance, assert_close, assert_law

LOOSE = Tolerance(absolute=0.1, relative=0.01, why="for this test")
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("actual", "expected"), [([1.0, 2.0], [1.05, 2.1]), ([100.0], [101.0]), ([INF, -INF], [INF, -INF]), ([], [])]
)
def test_values_within_the_bound_pass(actual: list[float], expected: list[float]) -> None:
    assert_close(np.array(actual), torch.tensor(expected), LOOSE)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [([1.0, 2.0], [1.0, 2.2]), ([NAN], [1.0]), ([1.0], [NAN]), ([NAN], [NAN]), ([INF], [1.0]), ([INF], [-INF])],
)
def test_values_beyond_it_fail(actual: list[float], expected: list[float]) -> None:
    with pytest.raises(AssertionError, match="worst at"):
        assert_close(actual, expected, LOOSE)


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.zeros(2, 1), torch.zeros(2), LOOSE)


def test_the_worst_element_is_named() -> None:
    with pytest.raises(AssertionError, match=r"logits: 2 of 4 elements off; worst at \(1, 0\)"):
        assert_close([[0.0, 1.0], [5.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], LOOSE, "logits")


def test_a_law_is_measured_against_the_largest_magnitude() -> None:
    expected = torch.tensor([1000.0, 0.0])
    assert_law(expected + 0.9 * LAW_OF_MAX * 1000, expected)
    with pytest.raises(AssertionError):
        assert_law(expected + 1.1 * LAW_OF_MAX * 1000, expected)


def test_fresh_memory_is_poisoned_on_request(poisoned_memory: None) -> None:
    assert torch.empty(1000).isnan().all()
    assert torch.empty(3, 4, dtype=torch.bfloat16).isnan().all()
    assert (torch.empty(10, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
