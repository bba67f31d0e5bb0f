"""Several linear maps of one input (spec v4 2.5); those that agree in format and output dtype lie in one stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spyglass.ops.linear_block.reference import linear_block
from spyglass.quant.formats import FakeQuant
from spyglass.quant.packed import Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class MapStack:
    """Maps whose weights lie one behind the other: `weight` [sum of sizes, in], outputs of `sizes` channels each.

    `rounding` is applied to the input first; outputs have `out_dtype`.
    """

    weight: Packed
    sizes: tuple[int, ...]
    rounding: FakeQuant | None
    out_dtype: torch.dtype


def linear_merged(
    x_TI: torch.Tensor, stacks: Sequence[MapStack], *, rounded_TI: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """One output [..., size] per map, stack by stack: `linear_block` of each, without addend and bias.

    `rounded_TI`: the input as the maps with a rounding want it, where that is known.
    """
    found: list[torch.Tensor] = []
    for stack in stacks:
        known = stack.rounding is not None and rounded_TI is not None
        out_TO = linear_block(
            rounded_TI if known and rounded_TI is not None else x_TI,
            stack.weight,
            rounding=None if known else stack.rounding,
            out_dtype=stack.out_dtype,
        )
        found += [part.contiguous() for part in out_TO.split(stack.sizes, dim=-1)]
    return tuple(found)
