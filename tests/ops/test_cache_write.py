"""The defining cache write: rows to their places, padding nowhere."""

from __future__ import annotations

import torch

from spyglass.ops.cache_write.reference import cache_write


def test_rows_go_where_they_are_told_and_minus_one_goes_nowhere() -> None:
    pages = torch.full((3, 4, 2), float("nan"))
    rows = torch.arange(8.0).view(4, 2)
    cache_write(pages, rows, torch.tensor([11, -1, 0, 5]))
    flat = pages.flatten(0, 1)
    assert torch.equal(flat[[11, 0, 5]], rows[[0, 2, 3]])
    assert flat.isnan().sum() == 2 * 9


def test_rows_are_cast_to_the_pages() -> None:
    pages = torch.zeros(1, 2, 3, dtype=torch.bfloat16)
    rows = torch.randn(1, 3)
    cache_write(pages, rows, torch.tensor([1]))
    assert torch.equal(pages[0, 1], rows[0].bfloat16())


def test_nothing_to_write_is_fine() -> None:
    pages = torch.zeros(1, 2, 3)
    cache_write(pages, torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
    cache_write(pages, torch.randn(2, 3), torch.tensor([-1, -1]))
    assert pages.abs().sum() == 0


def test_the_gradient_of_a_row_comes_from_its_own_place_only() -> None:
    rows = torch.randn(4, 3, requires_grad=True)
    pages = torch.zeros(2, 4, 3)
    cache_write(pages, rows, torch.tensor([-1, 6, -1, 2]))
    pages.sum().backward()
    assert rows.grad is not None and torch.equal(rows.grad[:, 0], torch.tensor([0.0, 1.0, 0.0, 1.0]))
