"""Which Triton kernels some code launches, found without running them, and compiling them in processes of their own.

A stand-in for Triton's driver names a generation of GPU. Inside `recorded` what is launched is written down, with the
options and specialisations of that very launch, and neither compiled nor run, so tensors may lie on "meta". Triton
compiles one kernel after another and holds the interpreter meanwhile; other processes write to the same cache of files,
from which this one loads.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

OF_AN_H200 = 132  # streaming multiprocessors
_MOST_PROCESSES = 16
_CHILD = (
    "import sys; sys.path[:] = sys.argv[2:]; from spyglass.ops.launches import compile_share; "
    "sys.exit(compile_share(int(sys.argv[1])))"
)
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel as a launch wants it: its place in the package, and what it is specialised for, in Triton's own JSON."""

    module: str
    name: str
    specialisation: str

    def compile(self) -> Any:
        """Triton's compiled kernel, for the GPU that is there or stood in for; from Triton's files where it can be."""
        return getattr(importlib.import_module(self.module), self.name).preload(self.specialisation)


class _StandIn:
    """As much of Triton's driver as compiling asks for.

    Each generation counts as a device, with a cache of its own; another one is for recording, where nothing may be
    found that was compiled before.
    """

    recording = False

    def __init__(self, generation: int, processors: int = OF_AN_H200) -> None:
        self.generation, self.processors = generation, processors

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.generation, 32)

    def get_current_device(self) -> int:
        return -self.generation if self.recording else self.generation

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@contextmanager
def pretended(generation: int, processors: int = OF_AN_H200) -> Iterator[_StandIn]:
    """Inside, Triton takes a GPU of compute capability `generation` (90 = 9.0) to be there, and can compile for it.

    Holds for the whole process: nothing else may launch meanwhile.
    """
    from triton.runtime import driver

    stand_in = _StandIn(generation, processors)
    driver.set_active(stand_in)
    try:
        yield stand_in
    finally:
        with suppress(RuntimeError):  # without a GPU there is nothing to go back to
            driver.reset_active()


@contextmanager
def recorded(generation: int, processors: int = OF_AN_H200) -> Iterator[Counter[Kernel]]:
    """Inside, launches are counted by kernel instead of being made; see `pretended`."""
    from triton import knobs

    launched: Counter[Kernel] = Counter()

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        launched[Kernel(fn.module, fn.name, compile["specialization_data"])] += 1
        return True  # do not compile it; what is never compiled is never launched

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        with pretended(generation, processors) as stand_in:
            stand_in.recording = True
            yield launched
    finally:
        knobs.runtime.jit_cache_hook = before


def compile_kernels(kernels: Collection[Kernel], generation: int, processes: int | None = None) -> None:
    """Compile for GPUs of compute capability `generation` into Triton's cache, side by side in other processes.

    A kernel that fails is logged and left to its first launch, which raises what is wrong with it.
    """
    wanted = list(kernels)
    most = processes or min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4)
    children = []
    for first in range(min(most, len(wanted))):
        with tempfile.TemporaryFile("w+") as share:
            json.dump([(one.module, one.name, one.specialisation) for one in wanted[first::most]], share)
            share.seek(0)
            command = [sys.executable, "-c", _CHILD, str(generation), *sys.path]
            children.append(subprocess.Popen(command, stdin=share, stdout=subprocess.DEVNULL))
    failed = sum([child.wait() != 0 for child in children])
    if failed:
        _LOG.warning("%d of %d processes could not compile all their kernels", failed, len(children))


def compile_share(generation: int) -> int:
    """What a process of `compile_kernels` does, and its exit code: kernels come on the standard input."""
    failed = 0
    with pretended(generation):
        for parts in json.load(sys.stdin):
            kernel = Kernel(*parts)
            try:
                kernel.compile()
            except Exception as error:  # whatever a compiler raises; the others are still wanted
                _LOG.warning("%s.%s cannot be compiled ahead: %s", kernel.module, kernel.name, error)
                failed += 1
    return 1 if failed else 0
