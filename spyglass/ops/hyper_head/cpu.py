"""Norm, product and sigmoid in one pass: `csrc/pointwise.cpp`."""

from __future__ import annotations

import torch

from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels

__all__ = ["hyper_head", "usable"]


def hyper_head(
    streams_TMC: torch.Tensor,
    fn_ME: torch.Tensor,
    scale_1: torch.Tensor,
    base_M: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """See `reference.py`. Raises DeviceError for an input that wants a gradient or a dtype without kernel."""
    native.refuse_gradient("hyper_head", streams_TMC, fn_ME, scale_1, base_M)
    dtype = native.dtype_code("hyper_head", streams_TMC)
    streams_TMC = streams_TMC.contiguous()
    fn_ME, scale_1, base_M = native.float32(fn_ME), native.float32(scale_1), native.float32(base_M)
    p_TM = torch.empty(streams_TMC.shape[:2])
    (kernels or native.best()).hyper_head(
        streams_TMC.data_ptr(), dtype, *streams_TMC.shape, fn_ME.data_ptr(), scale_1.data_ptr(), base_M.data_ptr(),
        norm_eps, hc_eps, p_TM.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return p_TM
