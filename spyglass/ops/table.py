"""Which implementation of each op runs: bound once, when a model is built (no registry, no module state).

`auto` takes what is there and usable on this device and dtype, else the reference; a named implementation that cannot
run is an error. An implementation is a module `spyglass.ops.<op>.<name>` with a function named like the op and
`usable(device_type, dtype_name) -> bool`, importable without building anything. `training` takes what has a gradient:
`training.py` where an op has that file, else the reference, which differentiates itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from spyglass.errors import DeviceError
from spyglass.ops.build import prepare, usable, why_not

if TYPE_CHECKING:
    from spyglass.ops.declare import Ops

OPS = tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/reference.py")))
# Device type -> implementation files, best first. `varlen` is torch's own variable-length attention, `cublas` its bf16
# matrix product.
_FASTER = {"cpu": ("cpu",), "cuda": ("triton", "cublas", "varlen")}
Which = Literal["auto", "reference", "training"]


def describe(device_type: str, dtype: str, which: Which = "auto") -> dict[str, str]:
    """Implementation name per op for a device type ("cpu", "cuda") and dtype name ("float32", "bfloat16").

    Raises DeviceError for an unknown choice.
    """
    if which not in get_args(Which):
        raise DeviceError(f"ops={which!r} is not known; use 'auto', 'reference' or 'training'")
    if which == "training":
        return {op: "training" if _exists(op, "training") else "reference" for op in OPS}
    return {op: _choose(op, device_type, dtype) if which == "auto" else "reference" for op in OPS}


def bind_ops(device_type: str, dtype: str, which: Which = "auto", without: Collection[str] = ()) -> Ops:
    """The ops a model of this device type and dtype will call; those of `without` by their reference.

    Raises DeviceError as `describe`.

    Compiled kernels are built here if need be; where that fails the reference runs, and a warning says why.
    """
    if device_type == "cpu" and which == "auto" and not prepare():
        logging.getLogger(__name__).warning("the slow reference ops run here: %s", why_not() or "the build failed")
    from spyglass.ops.declare import ON_META, Ops  # needs torch, which `describe` does without

    chosen = describe(device_type, dtype, which) | dict.fromkeys(without, "reference")
    bound: dict[str, Callable[..., Any]] = {
        op: getattr(importlib.import_module(f"spyglass.ops.{op}.{name}"), op) for op, name in chosen.items()
    }
    if device_type == "meta":
        bound |= ON_META
    return Ops(bound, chosen, device_type)


def _choose(op: str, device_type: str, dtype: str) -> str:
    for name in _FASTER.get(device_type, ()):
        if not _exists(op, name):
            continue
        if name == "cpu":  # the same answer for all, and without loading torch
            return name if usable(device_type, dtype) else "reference"
        if importlib.import_module(f"spyglass.ops.{op}.{name}").usable(device_type, dtype):
            return name
    return "reference"


def _exists(op: str, name: str) -> bool:
    return importlib.util.find_spec(f"spyglass.ops.{op}.{name}") is not None
