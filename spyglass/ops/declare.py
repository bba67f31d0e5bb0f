"""The ops of the models, each declared by its reference: its name, its signature and its definition.

What an implementation can do beside being called is asked by name. A module `spyglass.ops.<op>.<implementation>` may
say

    CAPABILITIES   frozenset of names; "capturable" alone where it says nothing
    check_weight   (name, weight) -> None; raises DeviceError for values it cannot hold

"capturable": never reads a value of a tensor on the host, so that a graph can hold it. "rounds_apart": a map rounds its
input in a launch of its own, which whatever makes the input saves by doing it. "saves_logits": the largest output is
found without writing the others. "merges": maps of one input share a launch. "joins_rank_rows": an addend may be
`RankRows`, which are not multiplied out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any, Literal

import torch

from spyglass.ops.add_shared.reference import add_shared
from spyglass.ops.cache_write.reference import cache_write
from spyglass.ops.compress_pool.reference import compress_pool
from spyglass.ops.compress_rows.reference import compress_rows
from spyglass.ops.engram_gate.reference import engram_gate
from spyglass.ops.experts_grouped.reference import experts_grouped
from spyglass.ops.fake_quant.reference import fake_quant
from spyglass.ops.hadamard.reference import hadamard
from spyglass.ops.hyper_collapse.reference import hyper_collapse
from spyglass.ops.hyper_expand.reference import hyper_expand
from spyglass.ops.hyper_head.reference import hyper_head
from spyglass.ops.hyper_mix.reference import hyper_mix
from spyglass.ops.hyper_read.reference import hyper_read
from spyglass.ops.hyper_write_read.reference import hyper_write_read
from spyglass.ops.index_blocks.reference import index_blocks
from spyglass.ops.index_topk.reference import index_topk
from spyglass.ops.linear_argmax.reference import linear_argmax
from spyglass.ops.linear_block.reference import linear_block
from spyglass.ops.linear_grouped.reference import linear_grouped
from spyglass.ops.linear_merged.reference import linear_merged
from spyglass.ops.lora_delta.reference import lora_delta
from spyglass.ops.rms_norm.reference import rms_norm
from spyglass.ops.rope_half.reference import rope_half
from spyglass.ops.rope_partial.reference import rope_partial
from spyglass.ops.router_topk.reference import router_topk
from spyglass.ops.row_finish.reference import row_finish
from spyglass.ops.silu_mul.reference import silu_mul
from spyglass.ops.sparse_attention.reference import sparse_attention
from spyglass.ops.swiglu.reference import swiglu
from spyglass.ops.vit_attention.reference import vit_attention
from spyglass.quant.packed import Packed

Backend = Literal["eager", "cpu_graph", "cuda_graph"]
Capability = Literal["capturable", "rounds_apart", "saves_logits", "merges", "joins_rank_rows"]
_DEFAULT: frozenset[Capability] = frozenset({"capturable"})


Watch = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Slot:
    """An op as modules hold it; what it calls is exchanged while it is watched."""

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function, updated=())
        self.function = function

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.function(*args, **options)

    def watch(self, op: str, watch: Watch, function: Callable[..., Any]) -> None:
        self.function = lambda *args, **options: watch(op, function, args, options)


class Ops:
    """One function per op, to be called as its reference; `chosen` names the implementation of each."""

    linear_block = staticmethod(linear_block)
    linear_argmax = staticmethod(linear_argmax)
    linear_grouped = staticmethod(linear_grouped)
    linear_merged = staticmethod(linear_merged)
    experts_grouped = staticmethod(experts_grouped)
    lora_delta = staticmethod(lora_delta)
    router_topk = staticmethod(router_topk)
    sparse_attention = staticmethod(sparse_attention)
    index_topk = staticmethod(index_topk)
    index_blocks = staticmethod(index_blocks)
    compress_pool = staticmethod(compress_pool)
    compress_rows = staticmethod(compress_rows)
    hyper_mix = staticmethod(hyper_mix)
    hyper_head = staticmethod(hyper_head)
    hyper_collapse = staticmethod(hyper_collapse)
    hyper_expand = staticmethod(hyper_expand)
    hyper_read = staticmethod(hyper_read)
    hyper_write_read = staticmethod(hyper_write_read)
    row_finish = staticmethod(row_finish)
    rope_partial = staticmethod(rope_partial)
    rope_half = staticmethod(rope_half)
    silu_mul = staticmethod(silu_mul)
    rms_norm = staticmethod(rms_norm)
    fake_quant = staticmethod(fake_quant)
    hadamard = staticmethod(hadamard)
    cache_write = staticmethod(cache_write)
    swiglu = staticmethod(swiglu)
    add_shared = staticmethod(add_shared)
    engram_gate = staticmethod(engram_gate)
    vit_attention = staticmethod(vit_attention)

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], chosen: Mapping[str, str], device_type: str
    ) -> None:
        self.chosen, self.device_type = chosen, device_type
        self._functions = functions
        self._slots = {op: _Slot(function) for op, function in functions.items()}
        for op, slot in self._slots.items():
            setattr(self, op, slot)
        # Whether what makes the input of an FP8 map should round it on its way out
        self.rounds_ahead = self.can("linear_block", "rounds_apart")
        self.merges = self.can("linear_merged", "merges")  # maps of one input share a launch
        # What captures steps of text; "eager" where an op reads the host, or where nothing would be gained
        self.capture_backend = self._capture_backend()

    def replaced(self, chosen: Mapping[str, str] | None = None, **functions: Callable[..., Any]) -> Ops:
        """The same with other functions for some ops."""
        return Ops({**self._functions, **functions}, self.chosen if chosen is None else chosen, self.device_type)

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Inside, what a call of an op gives is what `watch(op, function, args, options)` gives."""
        for op, slot in self._slots.items():
            slot.watch(op, watch, self._functions[op])
        try:
            yield
        finally:
            for op, slot in self._slots.items():
                slot.function = self._functions[op]

    def can(self, op: str, capability: Capability) -> bool:
        """Whether the implementation of an op has a capability."""
        return capability in capabilities(op, self.chosen[op])

    def check_weight(self, name: str, weight: Packed) -> None:
        """Raises DeviceError if products of the weight `name` would not be those of its values."""
        module = _module("linear_block", self.chosen["linear_block"])
        if hasattr(module, "check_weight"):
            module.check_weight(name, weight)

    def _capture_backend(self) -> Backend:
        names = {name for op, name in self.chosen.items() if op != "vit_attention"}
        if not all(self.can(op, "capturable") for op in self.chosen if op != "vit_attention"):
            return "eager"
        if self.device_type == "cpu":
            return "cpu_graph" if "cpu" in names else "eager"
        return "cuda_graph" if self.device_type == "cuda" else "eager"


def capabilities(op: str, name: str) -> frozenset[str]:
    """Those of one implementation of an op."""
    module = _module(op, name)
    found: frozenset[str] = module.CAPABILITIES if hasattr(module, "CAPABILITIES") else _DEFAULT
    return found


def _module(op: str, name: str) -> Any:
    return importlib.import_module(f"spyglass.ops.{op}.{name}")


# On the device "meta", which has shapes and no values: references whose shapes follow values have another form.
ON_META: Mapping[str, Callable[..., torch.Tensor]] = {
    "experts_grouped": lambda x_TC, *args, **options: x_TC.new_empty(x_TC.shape, dtype=torch.float32),
    "vit_attention": lambda q, *args, **options: torch.empty_like(q),
}
