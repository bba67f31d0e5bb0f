"""Butterflies in registers and scratch: `csrc/pointwise.cpp`."""

from __future__ import annotations

import torch

from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels

__all__ = ["hadamard", "usable"]


def hadamard(x_ND: torch.Tensor, *, kernels: Kernels | None = None) -> torch.Tensor:
    """See `reference.py`. Raises DeviceError for an input that wants a gradient or a dtype without kernel."""
    native.refuse_gradient("hadamard", x_ND)
    dtype = native.dtype_code("hadamard", x_ND)
    x_ND = x_ND.contiguous()
    out_ND = torch.empty_like(x_ND)
    width = x_ND.shape[-1]
    assert width & (width - 1) == 0, width
    (kernels or native.best()).hadamard(
        x_ND.data_ptr(), dtype, x_ND.numel() // width, width, out_ND.data_ptr(), torch.get_num_threads()
    )
    return out_ND
