"""Weights streamed as they lie, or decoded block by block into a bf16 or fp32 product: `csrc/linear.cpp`."""

from __future__ import annotations

import torch

from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels
from spyglass.quant.formats import FakeQuant
from spyglass.quant.packed import Packed

__all__ = ["check_weight", "linear_block", "usable"]

check_weight = native.refuse_scales


def linear_block(
    x_TI: torch.Tensor,
    weight: Packed,
    *,
    rounding: FakeQuant | None = None,
    addend_TO: torch.Tensor | None = None,
    bias_O: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """See `reference.py`. bf16 inputs multiply in bf16 pairs with fp32 sums where the processor can, else in fp32.

    Raises:
        DeviceError: an input wants a gradient, or a dtype or block size has no kernel.
    """
    native.refuse_gradient("linear_block", x_TI, addend_TO, bias_O, weight.data)
    dtype = native.dtype_code("linear_block", x_TI)
    out_features, in_features = weight.shape
    x_TI = x_TI.contiguous()
    rows = x_TI.numel() // in_features
    out_TO = torch.empty((*x_TI.shape[:-1], out_features), dtype=x_TI.dtype if out_dtype is None else out_dtype)
    if addend_TO is not None:
        addend_TO = native.float32(addend_TO)
    if bias_O is not None:
        bias_O = native.float32(bias_O)
    (kernels or native.best()).linear(
        x_TI.data_ptr(), dtype, rows, 1, *native.matrix_arguments("linear_block", weight),
        *native.quant_codes(rounding), native.address(addend_TO), native.address(bias_O), out_TO.data_ptr(),
        native.dtype_code("linear_block", out_TO), torch.get_num_threads(),
    )  # fmt: skip
    return out_TO
