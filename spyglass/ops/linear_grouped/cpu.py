"""The blocks of a block-diagonal matrix in one call: `csrc/linear.cpp`."""

from __future__ import annotations

import torch

from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels
from spyglass.quant.packed import Packed

__all__ = ["linear_grouped", "usable"]


def linear_grouped(
    x_TGI: torch.Tensor, weight: Packed, *, addend_TGO: torch.Tensor | None = None, kernels: Kernels | None = None
) -> torch.Tensor:
    """See `reference.py`.

    Raises:
        DeviceError: an input wants a gradient, or a dtype or block size has no kernel.
    """
    native.refuse_gradient("linear_grouped", x_TGI, addend_TGO, weight.data)
    dtype = native.dtype_code("linear_grouped", x_TGI)
    rows, groups, _ = x_TGI.shape
    out_features = weight.shape[0]
    x_TGI = x_TGI.contiguous()
    out_TGO = torch.empty((rows, groups, out_features // groups), dtype=x_TGI.dtype)
    if addend_TGO is not None:
        addend_TGO = native.float32(addend_TGO)
    (kernels or native.best()).linear(
        x_TGI.data_ptr(), dtype, rows, groups, *native.matrix_arguments("linear_grouped", weight), *native.NO_QUANT,
        native.address(addend_TGO), None, out_TGO.data_ptr(), dtype, torch.get_num_threads(),
    )  # fmt: skip
    return out_TGO
