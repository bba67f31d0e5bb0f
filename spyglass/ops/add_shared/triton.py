"""One launch, where the reference makes three passes."""

from __future__ import annotations

import torch

from spyglass.ops.add_shared import reference
from spyglass.ops.gpu import learns, usable

__all__ = ["add_shared", "usable"]


def add_shared(routed_TC: torch.Tensor, shared_TC: torch.Tensor) -> torch.Tensor:
    """See `reference.py`, which also serves gradients and float64."""
    if learns(routed_TC, shared_TC) or torch.float64 in (routed_TC.dtype, shared_TC.dtype):
        return reference.add_shared(routed_TC, shared_TC)
    from spyglass.ops.add_shared.triton_kernel import add

    routed_TC, shared_TC = routed_TC.contiguous(), shared_TC.contiguous()
    out_TC = torch.empty_like(shared_TC)
    add(routed_TC, shared_TC, out_TC)
    return out_TC
