"""All butterflies of a row in one launch, in the order of the reference."""

from __future__ import annotations

import torch

from spyglass.ops.gpu import learns, usable
from spyglass.ops.hadamard import reference

__all__ = ["hadamard", "usable"]
_WIDEST = 1 << 12  # a row is held in registers


def hadamard(x_ND: torch.Tensor) -> torch.Tensor:
    """See `reference.py`, which also serves gradients, float64 and very wide rows."""
    if learns(x_ND) or x_ND.dtype == torch.float64 or not 2 <= x_ND.shape[-1] <= _WIDEST:
        return reference.hadamard(x_ND)
    from spyglass.ops.hadamard.triton_kernel import rotate

    rows_ND = x_ND.reshape(-1, x_ND.shape[-1]).contiguous()
    assert rows_ND.shape[1] & (rows_ND.shape[1] - 1) == 0, rows_ND.shape
    out_ND = torch.empty(rows_ND.shape, dtype=x_ND.dtype, device=x_ND.device)
    rotate(rows_ND, out_ND)
    return out_ND.view(x_ND.shape)
