"""One launch for all maps where they have few rows, one a stack of FP8 weights up to a thousand: see `linear_block`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from spyglass.ops import gpu
from spyglass.ops.linear_block import triton as linear
from spyglass.ops.linear_merged.reference import MapStack

CAPABILITIES = frozenset({"capturable", "merges"})
usable = linear.usable


def linear_merged(
    x_TI: torch.Tensor, stacks: Sequence[MapStack], *, rounded_TI: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """See `reference.py`. What the merged kernels do not take is multiplied map by map."""
    rows = x_TI.numel() // x_TI.shape[-1]
    x_TI = x_TI.contiguous()
    fits = all(linear.suits(x_TI, stack.weight, stack.rounding, rows) for stack in stacks)
    fits = fits and not gpu.learns(x_TI, *(stack.weight.data for stack in stacks))
    if fits and rows <= linear.FEW:
        from spyglass.ops.linear_block import triton_launch

        merged = triton_launch.multiply_merged(x_TI, rounded_TI, stacks)
        if merged is not None:
            return merged
    found: list[torch.Tensor] = []
    for stack in stacks:
        known = rounded_TI if stack.rounding is not None else None
        found += _stack(x_TI, stack) if known is None else _stack(known, replace(stack, rounding=None))
    return tuple(found)


def _stack(x_TI: torch.Tensor, stack: MapStack) -> Sequence[torch.Tensor]:
    rows = x_TI.numel() // x_TI.shape[-1]
    if len(stack.sizes) == 1 or gpu.learns(x_TI, stack.weight.data):
        return _one_by_one(x_TI, stack)
    if stack.weight.format.name == "bf16":  # one matrix product; the outputs are parts of its rows
        out_TO = linear.linear_block(x_TI, stack.weight, rounding=stack.rounding, out_dtype=stack.out_dtype)
        return out_TO.split(stack.sizes, dim=-1)
    if linear.suits(x_TI, stack.weight, stack.rounding, rows):
        from spyglass.ops.linear_block import triton_launch

        merged = triton_launch.multiply_stack(x_TI, stack)
        if merged is not None:
            return merged
    return _one_by_one(x_TI, stack)


def _one_by_one(x_TI: torch.Tensor, stack: MapStack) -> Sequence[torch.Tensor]:
    found, first = [], 0
    for size in stack.sizes:
        weight = stack.weight.rows(first, first + size)
        found.append(linear.linear_block(x_TI, weight, rounding=stack.rounding, out_dtype=stack.out_dtype))
        first += size
    return found
