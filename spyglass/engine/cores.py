"""Threads of the CPU kernels, and where the memory lies that they read, for a model that runs on processors."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from spyglass.config.options import threads_are_bound
from spyglass.machine import Cores, host_memory, usable_cores

_FEW = 8  # threads: up to so many, each reads as much as the one before
_SAME = 0.97  # of the best rate: what a short measurement cannot tell from it
_PROBED = 1 << 29  # bytes, more than caches hold
_MUCH = 8 * _PROBED
_RUNS = 3
_POLICY_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}  # numbers of set_mempolicy and get_mempolicy
_DEFAULT, _INTERLEAVE = 0, 3
_LOG = logging.getLogger(__name__)


@cache
def torch_threads() -> int:
    """Threads that torch was told before a model was loaded here, whatever number the models asked for since."""
    return torch.get_num_threads()


def default_threads(
    processes: int = 1,
    *,
    told: int | None = None,
    reads: bool = True,
    cores: Cores | None = None,
    rate: Callable[[int], float] | None = None,
) -> int:
    """Threads of each of so many processes: one for each physical core that may be used and whose time is allowed.

    Fewer where torch was `told` fewer (now, unless stated), or where fewer read memory faster. The choice is logged.
    Where the environment binds threads to processors (`OMP_PROC_BIND` and the like), the first one has a processor of
    its own by now, and what the process may use is no longer seen: torch's number holds.
    `reads`: whether they will read weights. `rate`: bytes per second that so many threads read; measured, where there
    are many of them and much memory, unless given.
    """
    is_bound = cores is None and threads_are_bound()
    cores = usable_cores() if cores is None else cores
    told = torch.get_num_threads() if told is None else told
    threads = told if is_bound else min(told, cores.threads)
    most = max(1, threads // processes)
    rates: dict[int, float] = {}
    if reads and most > _FEW and processes == 1 and (rate is not None or host_memory().free >= _MUCH):
        measure = _rate() if rate is None else rate
        rates = {threads: measure(threads) for threads in (most, most * 3 // 4, most // 2)}
    chosen = max((threads for threads in rates if rates[threads] >= _SAME * max(rates.values())), default=most)
    read = ", ".join(f"{threads} read {rate / 1e9:.0f} GB/s" for threads, rate in rates.items())
    _LOG.info("CPU threads: %d, on %s%s", chosen, cores, f" ({read})" if read else "")
    return chosen


def _rate() -> Callable[[int], float]:
    """How fast a product with one vector reads a large matrix."""
    columns = 8192
    weight, row = torch.ones(_PROBED // 4 // columns, columns), torch.ones(columns)

    def measure(threads: int) -> float:
        before, best = torch.get_num_threads(), float("inf")
        torch.set_num_threads(threads)
        try:
            for _ in range(_RUNS):
                started = time.perf_counter()
                torch.mv(weight, row)
                best = min(best, time.perf_counter() - started)
        finally:
            torch.set_num_threads(before)
        return _PROBED / best

    return measure


@contextmanager
def spread_memory(nodes: Sequence[int], call: Callable[..., int] | None = None) -> Iterator[bool]:
    """Inside, pages that this thread and those that it starts write first lie in all `nodes` in turn.

    Threads of all nodes read every weight, so that none has more than its share of the way to another node. False where
    there is one node, where somebody has chosen a policy (`numactl`), or where the system does not let it be; then
    pages lie where they are written first. `call`: the system's own, by number.
    """
    numbers = _POLICY_CALLS.get(platform.machine())
    if len(nodes) < 2 or numbers is None:
        yield False
        return
    system = ctypes.CDLL(None, use_errno=True).syscall if call is None else call
    (change, ask), bits, policy = numbers, 8 * ctypes.sizeof(ctypes.c_ulong), ctypes.c_int(_DEFAULT)
    mask = (ctypes.c_ulong * (max(nodes) // bits + 1))()
    for node in nodes:
        mask[node // bits] |= 1 << node % bits
    if system(ask, ctypes.byref(policy), None, 0, None, 0) == 0 and policy.value != _DEFAULT:
        _LOG.info("memory lies where the policy of this process says")
        yield False
        return
    if system(change, _INTERLEAVE, ctypes.byref(mask), bits * len(mask) + 1) != 0:
        _LOG.warning(
            "memory cannot be spread over the machine's %d nodes (%s): weights lie where they are read from disk, and "
            "threads of other nodes wait for them; start the process under `numactl --interleave=all`",
            len(nodes),
            os.strerror(ctypes.get_errno()),
        )
        yield False
        return
    _LOG.info("weights lie in %d nodes in turn", len(nodes))
    try:
        yield True
    finally:
        system(change, _DEFAULT, None, 0)
