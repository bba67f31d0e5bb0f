"""A model without memory, and which layers stand for all: layers of one kind launch the same kernels."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from spyglass.config.model import LayerPlan
from spyglass.layers.build import BuildContext, held_tensors

_Module = TypeVar("_Module", bound=nn.Module)


class _WithoutMemory(TorchFunctionMode):
    """Inside, a deep copy of a tensor has its shape and no memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        memo[id(tensor)] = out = torch.empty_like(tensor, device="meta")
        return out


def without_memory(module: _Module, build: BuildContext, left_out: object) -> _Module:
    """A copy of a module that was built with `build`, on the device "meta"; None in place of the object `left_out`."""
    with torch.no_grad(), _WithoutMemory():
        same = {id(shared): shared for shared in (build.ops, build.params, build.host)}
        return copy.deepcopy(module, {**same, id(left_out): None, id(build.device): torch.device("meta")})


def one_of_each(layers: Iterable[nn.Module], plans: Sequence[LayerPlan]) -> list[int]:
    """One layer of each kind, by plan, shapes and places of weights, and those whose rows or choices it uses;
    ascending."""
    found: dict[object, int] = {}
    for plan, layer in zip(plans, layers, strict=True):
        own = [None if source is None else source == plan.index for source in _sources(plan)]
        wired = replace(plan, index=0, kv_from=None, index_from=None, index_keys_from=None, candidates_from=None)
        weights = tuple((tuple(held.shape), held.dtype, held.device.type) for held in held_tensors(layer))
        found.setdefault((wired, *own, weights), plan.index)
    kept = set(found.values())
    while more := {source for index in kept for source in _sources(plans[index]) if source is not None} - kept:
        kept |= more
    return sorted(kept)


def _sources(plan: LayerPlan) -> tuple[int | None, ...]:
    return plan.kv_from, plan.index_from, plan.index_keys_from, plan.candidates_from
