"""Copy and rotation in one pass: `csrc/pointwise.cpp`."""

from __future__ import annotations

import torch

from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels

__all__ = ["rope_partial", "usable"]


def rope_partial(
    x_THD: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    *,
    inverse: bool = False,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """See `reference.py`. Raises DeviceError for an input that wants a gradient or a dtype without kernel."""
    native.refuse_gradient("rope_partial", x_THD)
    dtype = native.dtype_code("rope_partial", x_THD)
    x_THD, cos_TR, sin_TR = x_THD.contiguous(), native.float32(cos_TR), native.float32(sin_TR)
    out_THD = torch.empty_like(x_THD)
    (kernels or native.best()).rope(
        x_THD.data_ptr(), dtype, x_THD.shape[0], x_THD.shape[1:-1].numel(), x_THD.shape[-1], cos_TR.data_ptr(),
        sin_TR.data_ptr(), cos_TR.shape[-1], inverse, out_THD.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out_THD
