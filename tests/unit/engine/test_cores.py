"""How many threads a model on processors gets, and where its memory lies, on machines that are described only."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from spyglass.engine.cores import default_threads, spread_memory
from spyglass.machine import Cores, Device


@pytest.fixture(autouse=True)
def many_threads() -> Iterator[None]:
    """Torch has been told nothing that would be less than the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(192)
    yield
    torch.set_num_threads(before)


def cores(count: int, threads_each: int = 1, quota: float | None = None) -> Cores:
    each = tuple(tuple(range(core, count * threads_each, count)) for core in range(count))
    return Cores(cores=each, nodes=(0,), quota=quota)


def reads(*knee: int) -> Callable[[int], float]:
    """Threads that read 1 GB/s each up to a knee, and lose a tenth of it for each one behind."""
    return lambda threads: 1e9 * (threads if threads <= knee[0] else knee[0] - (threads - knee[0]) / 10)


@pytest.mark.parametrize(
    ("machine", "processes", "knee", "threads"),
    [
        (cores(2), 1, 99, 2),
        (cores(8, 2), 1, 4, 8),  # few: nothing is measured
        (cores(16, 2), 1, 99, 16),
        (cores(96, 2), 1, 48, 48),
        (cores(96, 2), 1, 96, 96),
        (cores(96, 2, quota=10.5), 1, 99, 10),
        (cores(96, 2, quota=0.5), 1, 99, 1),
        (cores(96), 4, 1, 24),
        (cores(1), 4, 1, 1),
    ],
)
def test_a_thread_for_each_core_unless_fewer_read_faster(
    machine: Cores, processes: int, knee: int, threads: int
) -> None:
    assert default_threads(processes, cores=machine, rate=reads(knee)) == threads


def test_as_many_as_read_alike_since_prompts_want_them_all() -> None:
    assert default_threads(cores=cores(32), rate=lambda threads: 100e9 - 2e9 * (threads == 32)) == 32
    assert default_threads(cores=cores(96), rate=reads(48), reads=False) == 96, "a GPU reads the weights"


def test_what_torch_was_told_is_the_most() -> None:
    torch.set_num_threads(3)
    assert default_threads(cores=cores(16)) == 3


def test_the_rate_of_this_machine_can_be_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With more threads than it has, perhaps; afterwards torch has as many as before."""
    caplog.set_level("INFO")
    for free, measured in ((1 << 33, True), (1 << 30, False)):
        caplog.clear()
        monkeypatch.setattr("spyglass.engine.cores.host_memory", lambda free=free: Device("host", free, free))
        assert default_threads(cores=cores(10)) in (10, 7, 5) and torch.get_num_threads() == 192
        assert ("on 10 physical cores (10 read " in caplog.text) == measured, "not where memory is short"


@pytest.mark.parametrize("error", [0, -1])
def test_memory_is_spread_over_the_nodes_that_the_process_runs_on(error: int) -> None:
    calls: list[tuple[Any, ...]] = []

    def call(*arguments: Any) -> int:
        calls.append(arguments)
        return error

    assert not spread_memory((0,), call) and not spread_memory((), call) and not calls
    known = platform.machine() in ("x86_64", "aarch64")
    assert spread_memory((0, 2, 3), call) == (known and error == 0)
    if known:
        ((_, interleave, mask, bits),) = calls
        assert interleave == 3 and bits > 64
        assert ctypes.cast(mask, ctypes.POINTER(ctypes.c_ulong))[0] == 0b1101
