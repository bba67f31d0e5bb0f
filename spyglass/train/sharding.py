"""The backbone's layers spread over processes: packed weights as they are, and what is trained in them.

The tower and everything outside the layers is held by every process: a step without images does not run the tower,
and processes that wait for one another must run the same things. So are the maps that read memories (V4.1), which the
backbone runs before it calls their layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from spyglass.layers.linear import Experts, GroupedLinear, Linear
from spyglass.lora.new import TrainableAdapter
from spyglass.model import VisionLanguageModel
from spyglass.parallel.fsdp import Processes
from spyglass.quant.packed import Packed

Put = Callable[[torch.Tensor], None]
_MEMORY = ".engram."


def shard_layers(
    model: VisionLanguageModel, adapter: TrainableAdapter, processes: Processes
) -> dict[str, torch.Tensor]:
    """Shard every layer; the result are the leaves to optimise, parts of them where they lie in a layer."""
    leaves: dict[str, torch.Tensor] = dict(adapter.parameters)
    for index, layer in enumerate(model.text.layers):
        own = {name: leaf for name, leaf in leaves.items() if name.startswith(f"layers.{index}.")}
        weights, puts = _weights(layer)
        parts = processes.shard(layer, weights | own, _binder(puts, adapter, list(own)))
        leaves |= {name: parts[name] for name in own}
        for put in puts.values():
            put(torch.empty(0, dtype=torch.uint8))  # let go of the whole tensors
    return leaves


def _binder(puts: Mapping[str, Put], adapter: TrainableAdapter, own: list[str]) -> Callable[..., None]:
    """Where a layer's whole tensors go each time it runs."""

    def bind(tensors: Mapping[str, torch.Tensor]) -> None:
        for name, put in puts.items():
            put(tensors[name])
        for name in own:
            if name.endswith(".lora_A"):
                place = name.removesuffix(".lora_A")
                adapter.swap(place, tensors[name], tensors[f"{place}.lora_B"])

    return bind


def _weights(layer: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Put]]:
    """The stored bytes of a layer's matrices by name, and for each the way back into its module."""
    tensors: dict[str, torch.Tensor] = {}
    puts: dict[str, Put] = {}

    def add(name: str, weight: Packed, put: Callable[[Packed], None]) -> None:
        held = {"data": weight.data, "scale": weight.scale}
        for part, tensor in held.items():
            if tensor is not None:
                tensors[f"{name}.{part}"] = tensor.view(torch.uint8)
                puts[f"{name}.{part}"] = _part_put(held, part, tensor.dtype, weight, put)

    for module in layer.modules():
        if isinstance(module, Linear | GroupedLinear):
            if _MEMORY in module.name:
                continue
            assert module.weight is not None
            add(module.name, module.weight, _weight_put(module))
        elif isinstance(module, Experts):
            for matrix, stack in module.stacks.items():
                add(f"{module.name}.{matrix}", stack, _stack_put(module, matrix))
    return tensors, puts


def _part_put(
    held: dict[str, torch.Tensor | None], part: str, dtype: torch.dtype, weight: Packed, put: Callable[[Packed], None]
) -> Put:
    format, shape = weight.format, weight.shape

    def put_part(tensor: torch.Tensor) -> None:
        held[part] = tensor.detach().view(dtype)
        data = held["data"]
        assert data is not None
        put(Packed(format, data, held["scale"], shape))

    return put_part


def _weight_put(module: Linear | GroupedLinear) -> Callable[[Packed], None]:
    def put(weight: Packed) -> None:
        module.weight = weight

    return put


def _stack_put(module: Experts, matrix: str) -> Callable[[Packed], None]:
    def put(weight: Packed) -> None:
        module.stacks[matrix] = weight

    return put


def whole_adapter(
    adapter: TrainableAdapter, leaves: Mapping[str, torch.Tensor], processes: Processes
) -> TrainableAdapter:
    """The adapter with every leaf in one piece; all processes must ask."""
    whole = {name: nn.Parameter(processes.whole(leaf.detach())) for name, leaf in leaves.items()}
    return replace(adapter, parameters=whole)
