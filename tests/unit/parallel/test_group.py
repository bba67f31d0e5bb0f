"""What several processes do together gives each of them the same bits, in the order of the ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce

import pytest
import torch
import torch.distributed as dist

from spyglass.parallel.group import ALONE, Group
from spyglass.parallel.processes import ProcessGroup


def together(size: int, run: Callable[[Group, int], torch.Tensor]) -> list[torch.Tensor]:
    """Ranks as threads of one process, over gloo."""
    store = dist.HashStore()

    def rank(number: int) -> torch.Tensor:
        return run(ProcessGroup(store, number, size, torch.device("cpu"), timeout_s=60), number)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shape", [(5, 7), (3, 90_001)], ids=["small", "large"])
def test_a_sum_is_made_in_the_order_of_the_ranks_however_large_it_is(size: int, shape: tuple[int, int]) -> None:
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 10**rank for rank in range(size)]
    expected = reduce(torch.add, parts)
    for found in together(size, lambda group, rank: group.sum(parts[rank].clone())):
        assert torch.equal(found, expected)


def test_columns_of_unequal_numbers_are_joined() -> None:
    whole = torch.randn(4, 7)
    parts = whole.split([2, 2, 3], dim=1)
    for found in together(3, lambda group, rank: group.join(parts[rank], [2, 2, 3])):
        assert torch.equal(found, whole)


def test_the_largest_is_the_first_of_equals_and_NaN() -> None:
    values = torch.tensor([[1.0, 5.0, 2.0, -1.0], [3.0, 5.0, float("nan"), -2.0]])
    ids = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])

    def run(group: Group, rank: int) -> torch.Tensor:
        return torch.stack([part.double() for part in group.largest(ids[rank], values[rank])])

    for found in together(2, run):
        assert found[0].tolist() == [20, 11, 22, 13] and found[1].nan_to_num(-9).tolist() == [3, 5, -9, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_what_rank_0_has_comes_to_all(dtype: torch.dtype) -> None:
    for found in together(2, lambda group, rank: group.broadcast(torch.full((3,), 7 - 7 * rank, dtype=dtype))):
        assert found.tolist() == [7, 7, 7]


def test_one_process_gives_back_what_it_has() -> None:
    x = torch.randn(3, 4)
    assert ALONE.sum(x) is x and ALONE.join(x, [4]) is x and ALONE.broadcast(x) is x
    assert ALONE.total(x, x, torch.bfloat16) == (x, x) and ALONE.largest(x, x) == (x, x)


def test_what_waits_for_a_process_that_is_gone_fails() -> None:
    left = threading.Event()

    def run(group: Group, rank: int) -> torch.Tensor:
        if rank:
            group.close()
            left.set()
            return torch.zeros(0)
        left.wait()
        with pytest.raises(RuntimeError):
            group.sum(torch.ones(3))
        return torch.zeros(0)

    together(2, run)
