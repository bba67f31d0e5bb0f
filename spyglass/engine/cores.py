"""Threads of the CPU kernels, and where the memory lies that they read, for a model that runs on processors."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence

import torch

from spyglass.machine import Cores, host_memory, usable_cores

_FEW = 8  # threads: up to so many, each reads as much as the one before
_SAME = 0.97  # of the best rate: what a short measurement cannot tell from it
_PROBED = 1 << 29  # bytes, more than caches hold
_MUCH = 8 * _PROBED
_RUNS = 3
_SET_POLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the call set_mempolicy
_INTERLEAVE = 3
_LOG = logging.getLogger(__name__)


def default_threads(
    processes: int = 1,
    *,
    reads: bool = True,
    cores: Cores | None = None,
    rate: Callable[[int], float] | None = None,
) -> int:
    """Threads of each of so many processes: one for each physical core that may be used and whose time is allowed.

    Fewer where torch was told fewer, or where fewer read memory faster. What was chosen is said in the log.
    `reads`: whether they will read weights. `rate`: bytes per second that so many threads read; measured, where there
    are many of them and much memory, unless given.
    """
    cores = usable_cores() if cores is None else cores
    most = max(1, min(torch.get_num_threads(), cores.threads) // processes)
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


def spread_memory(nodes: Sequence[int], call: Callable[..., int] | None = None) -> bool:
    """Let pages that this thread and those that it starts will write first lie in all `nodes` in turn.

    Threads of all nodes read every weight, so that none has more than its share of the way to another node. False where
    there is one node, or the system does not let it be; then pages lie where they are written first. `call`: the
    system's own, by number.
    """
    number = _SET_POLICY.get(platform.machine())
    if len(nodes) < 2 or number is None:
        return False
    mask = ctypes.c_ulong(sum(1 << node for node in nodes))
    system = ctypes.CDLL(None, use_errno=True).syscall if call is None else call
    if system(number, _INTERLEAVE, ctypes.byref(mask), 8 * ctypes.sizeof(mask) + 1) == 0:
        _LOG.info("memory lies in %d nodes in turn", len(nodes))
        return True
    _LOG.warning(
        "memory cannot be spread over the machine's %d nodes (%s): weights lie where they are read from disk, and "
        "threads of other nodes wait for them; start the process under `numactl --interleave=all`",
        len(nodes),
        os.strerror(ctypes.get_errno()),
    )
    return False
