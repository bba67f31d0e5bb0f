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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from spyglass.errors import DeviceError
from spyglass.ops.build import prepare, usable, why_not

OPS = (
    "linear_block",
    "linear_largest",
    "linear_grouped",
    "experts_grouped",
    "lora_delta",
    "router_topk",
    "sparse_attention",
    "index_topk",
    "index_blocks",
    "compress_pool",
    "compress_rows",
    "hyper_mix",
    "hyper_head",
    "hyper_collapse",
    "hyper_expand",
    "hyper_read",
    "hyper_write_read",
    "row_finish",
    "rope_partial",
    "rope_half",
    "silu_mul",
    "rms_norm",
    "fake_quant",
    "hadamard",
    "cache_write",
    "swiglu",
    "add_shared",
    "vit_attention",
    "engram_gate",
)
# Device type -> implementation files, best first. `varlen` is torch's own variable-length attention, `cublas` its bf16
# matrix product.
_FASTER = {"cpu": ("cpu",), "cuda": ("triton", "cublas", "varlen")}
Which = Literal["auto", "reference", "training"]
Backend = Literal["eager", "cpu_graph", "cuda_graph"]
# Attentions of the picture tower that a CUDA graph can hold; the reference asks the host where pictures end.
GRAPHABLE_ATTENTION = ("triton", "varlen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One callable per op, signatures as in each `reference.py`; `chosen` names the implementation of each."""

    linear_block: Callable[..., Any]
    linear_largest: Callable[..., Any]
    linear_grouped: Callable[..., Any]
    experts_grouped: Callable[..., Any]
    lora_delta: Callable[..., Any]
    router_topk: Callable[..., Any]
    sparse_attention: Callable[..., Any]
    index_topk: Callable[..., Any]
    index_blocks: Callable[..., Any]
    compress_pool: Callable[..., Any]
    compress_rows: Callable[..., Any]
    hyper_mix: Callable[..., Any]
    hyper_head: Callable[..., Any]
    hyper_collapse: Callable[..., Any]
    hyper_expand: Callable[..., Any]
    hyper_read: Callable[..., Any]
    hyper_write_read: Callable[..., Any]
    row_finish: Callable[..., Any]
    rope_partial: Callable[..., Any]
    rope_half: Callable[..., Any]
    silu_mul: Callable[..., Any]
    rms_norm: Callable[..., Any]
    fake_quant: Callable[..., Any]
    hadamard: Callable[..., Any]
    cache_write: Callable[..., Any]
    swiglu: Callable[..., Any]
    add_shared: Callable[..., Any]
    vit_attention: Callable[..., Any]
    engram_gate: Callable[..., Any]
    chosen: Mapping[str, str]

    @property
    def rounds_ahead(self) -> bool:
        """Whether what makes the input of an FP8 map should round it on its way out, for the map would do it apart."""
        return self.chosen["linear_block"] == "triton"

    @property
    def capture_backend(self) -> Backend:
        """What can capture these ops; experts without a kernel ask the host which of them have rows."""
        names = set(self.chosen.values())
        if "cpu" in names:
            return "cpu_graph"
        if "triton" in names and self.chosen["experts_grouped"] == "triton":
            return "cuda_graph"
        return "eager"


def describe(device_type: str, dtype: str, which: Which = "auto") -> dict[str, str]:
    """Implementation name per op for a device type ("cpu", "cuda") and dtype name ("float32", "bfloat16").

    Raises DeviceError for an unknown choice.
    """
    if which not in get_args(Which):
        raise DeviceError(f"ops={which!r} is not known; use 'auto', 'reference' or 'training'")
    if which == "training":
        return {op: "training" if _exists(op, "training") else "reference" for op in OPS}
    return {op: _choose(op, device_type, dtype) if which == "auto" else "reference" for op in OPS}


def bind_ops(device_type: str, dtype: str, which: Which = "auto") -> Ops:
    """The ops a model of this device type and dtype will call. Raises DeviceError as `describe`.

    Compiled kernels are built here if need be; where that fails the reference runs, and a warning says why.
    """
    if device_type == "cpu" and which == "auto" and not prepare():
        logging.getLogger(__name__).warning("the slow reference ops run here: %s", why_not() or "the build failed")
    chosen = describe(device_type, dtype, which)
    bound = {op: getattr(importlib.import_module(f"spyglass.ops.{op}.{name}"), op) for op, name in chosen.items()}
    return Ops(**bound, chosen=chosen)


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
