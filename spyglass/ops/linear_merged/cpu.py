"""Stack by stack: `linear_block` on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spyglass.ops.build import usable
from spyglass.ops.linear_block.cpu import linear_block
from spyglass.ops.linear_merged.reference import MapStack
from spyglass.ops.native import Kernels

__all__ = ["linear_merged", "usable"]


def linear_merged(
    x_TI: torch.Tensor,
    stacks: Sequence[MapStack],
    *,
    rounded_TI: torch.Tensor | None = None,
    kernels: Kernels | None = None,
) -> tuple[torch.Tensor, ...]:
    """See `reference.py`. Models on a CPU multiply map by map instead: a call costs little there.

    Raises:
        DeviceError: as `linear_block`.
    """
    found: list[torch.Tensor] = []
    for stack in stacks:
        known = rounded_TI if stack.rounding is not None else None
        x, rounding = (x_TI, stack.rounding) if known is None else (known, None)
        out_TO = linear_block(x, stack.weight, rounding=rounding, out_dtype=stack.out_dtype, kernels=kernels)
        found += [part.contiguous() for part in out_TO.split(stack.sizes, dim=-1)]
    return tuple(found)
