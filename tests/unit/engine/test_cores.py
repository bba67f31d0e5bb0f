"""How many threads a model on processors gets, and where its memory lies, on machines that are described only."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
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


@pytest.mark.parametrize(("error", "policy"), [(0, 0), (-1, 0), (0, 2)])
def test_weights_are_spread_over_the_nodes_that_the_process_runs_on(error: int, policy: int) -> None:
    """Unless somebody has chosen a policy, and for as long as they are loaded."""
    calls: list[tuple[Any, ...]] = []
    set_policy, get_policy = {"x86_64": (238, 239), "aarch64": (237, 236)}.get(platform.machine(), (0, 0))

    def call(number: int, *arguments: Any) -> int:
        if number == get_policy:
            ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_int))[0] = policy
            return 0
        assert number == set_policy
        calls.append(arguments)
        return error

    for nodes in ((0,), ()):
        with spread_memory(nodes, call) as spread:
            assert not spread and not calls
    with spread_memory((0, 2, 67), call) as spread:
        assert spread == (set_policy > 0 and error == policy == 0)
    if set_policy and policy == 0:
        (interleave, mask, bits), *after = calls
        assert interleave == 3 and bits > 128
        words = ctypes.cast(mask, ctypes.POINTER(ctypes.c_ulong))
        assert (words[0], words[1]) == (0b101, 0b1000)
        assert after == ([] if error else [(0, None, 0)])
    else:
        assert not calls


def test_threads_that_the_environment_binds_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them has one processor by then, which is all that is seen of the machine."""
    monkeypatch.setattr("spyglass.engine.cores.usable_cores", lambda: cores(1))
    assert default_threads(reads=False) == 1
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    assert default_threads(reads=False) == 192
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    assert default_threads(reads=False) == 1


@pytest.mark.slow
def test_a_later_model_of_a_process_gets_the_default_whatever_an_earlier_one_was_given() -> None:
    """Threads are set for the whole process; what an earlier model asked for is no more than its own choice."""
    code = """
import torch
from spyglass.config.engine import EngineConfig
from spyglass.config.shipped import find_model
from spyglass.engine.cores import default_threads
from spyglass.engine.load import load_ranks
path, cpu = find_model("spyglass-tiny-v4"), torch.device("cpu")
torch.set_num_threads(3)
default, found = default_threads(), []
for threads in (1, None, 2, None):
    loaded = load_ranks(path, EngineConfig(threads=threads), cpu, progress=False)
    found.append(torch.get_num_threads())
assert found == [1, default, 2, default], (found, default)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
