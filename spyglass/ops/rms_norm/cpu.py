"""One pass per row: `csrc/pointwise.cpp`."""

from __future__ import annotations

import torch

from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.fake_quant.cpu import fake_quant
from spyglass.ops.native import Kernels
from spyglass.quant.formats import FakeQuant

__all__ = ["rms_norm", "usable"]


def rms_norm(
    x_ND: torch.Tensor,
    weight_D: torch.Tensor | None,
    *,
    eps: float,
    stepwise: bool = False,
    quant: FakeQuant | None = None,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """See `reference.py`. Raises DeviceError for an input that wants a gradient or a dtype without kernel."""
    native.refuse_gradient("rms_norm", x_ND, weight_D)
    assert weight_D is None or not stepwise
    dtype = native.dtype_code("rms_norm", x_ND)
    x_ND = x_ND.contiguous()
    out_ND = torch.empty_like(x_ND)
    width = x_ND.shape[-1]
    if weight_D is not None:
        weight_D = native.float32(weight_D)
    (kernels or native.best()).rms_norm(
        x_ND.data_ptr(), dtype, x_ND.numel() // width, width, native.address(weight_D), eps, stepwise,
        out_ND.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out_ND if quant is None else fake_quant(out_ND, quant, kernels=kernels)
