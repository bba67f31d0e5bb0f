"""One pass: `csrc/pointwise.cpp`."""

from __future__ import annotations

import torch

from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels

__all__ = ["add_shared", "usable"]


def add_shared(routed_TC: torch.Tensor, shared_TC: torch.Tensor, *, kernels: Kernels | None = None) -> torch.Tensor:
    """See `reference.py`. Raises DeviceError for an input that wants a gradient or a dtype without kernel."""
    native.refuse_gradient("add_shared", routed_TC, shared_TC)
    dtype = native.dtype_code("add_shared", shared_TC)
    assert routed_TC.shape == shared_TC.shape
    routed_TC, shared_TC = native.float32(routed_TC), shared_TC.contiguous()
    out_TC = torch.empty_like(shared_TC)
    (kernels or native.best()).add_shared(
        routed_TC.data_ptr(), shared_TC.data_ptr(), dtype, *shared_TC.shape, out_TC.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out_TC
