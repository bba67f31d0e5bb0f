"""The rank rows of each row's own adapter, and no others: `csrc/pointwise.cpp`."""

from __future__ import annotations

import torch

from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels

__all__ = ["lora_delta", "usable"]


def lora_delta(
    x_TGI: torch.Tensor,
    adapter_T: torch.Tensor,
    a_RI: torch.Tensor,
    b_RGO: torch.Tensor,
    adapter_R: torch.Tensor,
    scale_R: torch.Tensor,
    *,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """See `reference.py`. Raises DeviceError for an input that wants a gradient or a dtype without kernel."""
    native.refuse_gradient("lora_delta", x_TGI, a_RI, b_RGO)
    dtype = native.dtype_code("lora_delta", x_TGI)
    rows, groups, inner = x_TGI.shape
    x_TGI, adapter_T, adapter_R = x_TGI.contiguous(), native.int32(adapter_T), native.int32(adapter_R)
    a_RI, b_RGO, scale_R = native.float32(a_RI), native.float32(b_RGO), native.float32(scale_R)
    out_TGO = torch.empty((rows, groups, b_RGO.shape[2]), dtype=torch.float32)
    (kernels or native.best()).lora_delta(
        x_TGI.data_ptr(), dtype, rows, groups, inner, adapter_T.data_ptr(), a_RI.data_ptr(), b_RGO.data_ptr(),
        adapter_R.data_ptr(), scale_R.data_ptr(), len(a_RI), out_TGO.shape[2], out_TGO.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out_TGO
