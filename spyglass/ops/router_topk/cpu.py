"""Scores as one product, choice in one pass: `csrc/pointwise.cpp`."""

from __future__ import annotations

import torch

from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels

__all__ = ["router_topk", "usable"]


def router_topk(
    x_TC: torch.Tensor,
    weight_EC: torch.Tensor,
    *,
    k: int,
    scale: float,
    bias_E: torch.Tensor | None,
    bias_image_E: torch.Tensor | None = None,
    is_image_T: torch.Tensor | None = None,
    forced_TK: torch.Tensor | None = None,
    forced_row_T: torch.Tensor | None = None,
    positions_T: torch.Tensor | None = None,
    kernels: Kernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.py`. Raises DeviceError for an input that wants a gradient or a dtype without kernel."""
    native.refuse_gradient("router_topk", x_TC, weight_EC, bias_E, bias_image_E)
    dtype, weight_dtype = native.dtype_code("router_topk", x_TC), native.dtype_code("router_topk", weight_EC)
    assert is_image_T is None or bias_image_E is not None
    rows, width = x_TC.shape
    x_TC, weight_EC = x_TC.contiguous(), weight_EC.contiguous()
    bias_E = None if bias_E is None else native.float32(bias_E)
    bias_image_E = None if bias_image_E is None else native.float32(bias_image_E)
    is_image_T = None if is_image_T is None else is_image_T.contiguous()
    forced_TK = None if forced_TK is None else native.int32(forced_TK)
    forced_row_T = None if forced_row_T is None else forced_row_T.to(torch.int64).contiguous()
    positions_T = None if positions_T is None else native.int32(positions_T)
    ids_TK = torch.empty((rows, k), dtype=torch.int32)
    weights_TK = torch.empty((rows, k))
    (kernels or native.best()).router(
        x_TC.data_ptr(), dtype, rows, width, weight_EC.data_ptr(), weight_dtype, weight_EC.shape[0], k, scale,
        native.address(bias_E), native.address(bias_image_E), native.address(is_image_T), native.address(forced_TK),
        native.address(forced_row_T), native.address(positions_T), ids_TK.data_ptr(), weights_TK.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return ids_TK, weights_TK
