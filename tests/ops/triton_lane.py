"""Triton kernels on a machine without a GPU: what they need once compiled, and what the interpreter makes of them.

Ops are called with tensors that have a shape and no memory; what they launch is compiled (`spyglass.ops.launches`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from spyglass.ops.launches import Kernel, pretended, recorded
from tests.ops.call import Source, poisoned, run_call
from tests.ops.cases import CASES

OPS_FOLDER = Path(__file__).resolve().parents[2] / "spyglass" / "ops"
# Bytes of shared memory that one program may ask for (CUDA programming guide)
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
GENERATIONS = tuple(SHARED_MEMORY)
CODES = torch.uint8  # of pages that hold codes
Key = tuple[str, ...]  # name of a kernel, and its constants and options at a launch
Results = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Arguments of an op at a released size; `may_spill` names generations where registers may go to memory."""

    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    may_spill: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel for one generation: bytes of shared memory, and of the stack frame (0 = nothing spilled)."""

    kernel: str
    shared: int
    frame: int
    registers: int
    settings: str
    may_spill: bool
    key: Key  # what the launch asked for

    @property
    def light(self) -> bool:
        """Far from the limits of every generation."""
        return self.shared <= 8192 and self.registers <= 128 and self.frame == 0


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def triton_ops() -> list[str]:
    """Ops with a Triton implementation."""
    return sorted(path.parent.name for path in OPS_FOLDER.glob("*/triton.py"))


def kernels_of(op: str) -> set[str]:
    """Names of the kernels that the files of an op launch, as `name[grid](...)`."""
    found: set[str] = set()
    for path in (OPS_FOLDER / op).glob("triton*.py"):
        source = path.read_text(encoding="utf-8")
        jitted = set(re.findall(r"@triton\.jit\b[^\n]*(?:\n[^\n]*)*?\ndef (\w+)\(", source))
        found |= {name for name in jitted if re.search(rf"\b{name}\[", source)}
    return found


@cache
def compile_op(op: str, generation: int) -> list[Compiled]:
    """Every launch of the op's launch file, compiled; for other generations than 9.0 not all that is light there."""
    light = frozenset() if generation == 90 else frozenset(one.key for one in compile_op(op, 90) if one.light)
    found: list[Compiled] = []
    seen: set[str] = set()
    for kernel, may_spill in launched(op, generation).items():
        key = _key(kernel)
        if key in light and kernel.name in seen:
            continue
        seen.add(kernel.name)
        with pretended(generation):
            found.append(_measured(key, kernel.compile(), may_spill))
    return found


def launches_of(op: str) -> tuple[Callable[[], Iterator[Launch]], Callable[[], None] | None]:
    """What yields an op's launches, in a file of its own or in `row_wise.py`, and what launches its backward."""
    if importlib.util.find_spec(f"tests.ops.launches.{op}") is None:
        module, names = importlib.import_module("tests.ops.launches.row_wise"), (op, f"train_{op}")
    else:
        module, names = importlib.import_module(f"tests.ops.launches.{op}"), ("launches", "train")
    return getattr(module, names[0]), vars(module).get(names[1])


def launched(op: str, generation: int) -> dict[Kernel, bool]:
    """Kernels that the op's launch file launches, and whether one may spill."""
    function = getattr(importlib.import_module(f"spyglass.ops.{op}.triton"), op)
    launches, train = launches_of(op)
    found: dict[Kernel, bool] = {}
    for launch in launches():
        with torch.inference_mode(), recorded(generation) as kernels:
            function(*launch.args, **launch.options)
        found |= dict.fromkeys(kernels, generation in launch.may_spill)
    if train is not None:
        with torch.inference_mode(), recorded(generation) as kernels:
            train()
        found |= dict.fromkeys(kernels, False)
    return found


def _key(kernel: Kernel) -> Key:
    """What does not depend on the generation: arguments, constants and the options that a launch states."""
    wanted = json.loads(kernel.specialisation)
    stated = {name: wanted["options"][name] for name in ("num_warps", "num_stages", "maxnreg")}
    parts = (wanted["signature"], wanted["constant_keys"], wanted["constant_vals"], wanted["attrs_keys"], stated)
    return kernel.name, *map(json.dumps, parts)


def _measured(key: Key, kernel: Any, may_spill: bool) -> Compiled:
    frame, registers = _frame_and_registers(kernel.asm["cubin"])
    data = kernel.metadata
    settings = f"num_warps={data.num_warps} num_stages={data.num_stages} {_constants(kernel)}"
    return Compiled(
        kernel=data.name,
        shared=data.shared,
        frame=frame,
        registers=registers,
        settings=settings,
        may_spill=may_spill,
        key=key,
    )


def _constants(kernel: Any) -> str:
    names = list(kernel.src.fn.arg_names)
    return " ".join(f"{names[path[0]]}={value}" for path, value in kernel.src.constants.items())


def _frame_and_registers(cubin: bytes) -> tuple[int, int]:
    """Largest stack frame (bytes) and register count of the functions in a cubin, from its `.nv.info` sections.

    A record is a form and an attribute, a byte each, and a 16-bit size; form 4 has that many bytes behind it.
    """
    sections, header_size, count, names_at = (
        struct.unpack_from("<Q", cubin, 40)[0],
        *struct.unpack_from("<HHH", cubin, 58),
    )
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + i * header_size) for i in range(count)]
    names = headers[names_at][4]
    frame = registers = 0
    for name, _, _, _, start, size in headers:
        label = cubin[names + name : cubin.index(b"\0", names + name)]
        if not label.startswith(b".nv.info"):
            continue
        at = start
        while at < start + size:
            form, attribute, length = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form != 4:
                continue
            if attribute == 0x11:  # EIATTR_FRAME_SIZE: symbol, bytes
                frame = max(frame, struct.unpack_from("<II", cubin, at)[1])
            elif attribute == 0x2F:  # EIATTR_REGCOUNT: symbol, registers
                registers = max(registers, struct.unpack_from("<II", cubin, at)[1])
            at += length
    return frame, registers


# The interpreter: a child process, because Triton decides at import what a kernel is.


def interpret() -> None:
    """Make this process one that interprets kernels; call before anything imports Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True


def interpreted(op: str, case: str, dtype: torch.dtype, rows: int) -> tuple[Results, Results]:
    """Results of the kernel and of the reference for one case, in a process that called `interpret`."""
    call = CASES[op, case](Source(dtype, rows))
    expected = run_call(getattr(_module(op, "reference"), op), call)
    with pretended(90):
        return run_call(getattr(_module(op, "triton"), op), call, place=poisoned), expected


@cache
def _module(op: str, name: str) -> ModuleType:
    return importlib.import_module(f"spyglass.ops.{op}.{name}")


def chosen(entries: int, k: int) -> Results:
    """What the interpreted `index_topk` and its reference choose of `entries`, many of which score the same."""
    from spyglass.ops.index_topk import reference, triton

    source = torch.Generator().manual_seed(entries)
    q, keys = (torch.randint(-3, 4, s, generator=source).float() for s in ((3, 2, 16), (entries // 64 + 1, 64, 16)))
    table = torch.randperm(len(keys), generator=source).int().expand(3, -1).contiguous()
    visible = torch.tensor([entries, k + 1, min(entries, k // 2)], dtype=torch.int32)
    rows = (q, torch.ones(3, 2), keys, table, torch.arange(3, dtype=torch.int32), visible)
    options: dict[str, Any] = {"k": k, "max_visible": entries, "stepwise": True}
    with pretended(90):
        return triton.index_topk(*rows, **options), reference.index_topk(*rows, **options)
