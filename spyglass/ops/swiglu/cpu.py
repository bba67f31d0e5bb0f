"""One pass: `csrc/pointwise.cpp`."""

from __future__ import annotations

import torch

from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.fake_quant.cpu import fake_quant
from spyglass.ops.native import Kernels
from spyglass.quant.formats import FakeQuant

__all__ = ["swiglu", "usable"]


def swiglu(
    gate_TF: torch.Tensor,
    up_TF: torch.Tensor,
    *,
    limit: float,
    quant: FakeQuant | None = None,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """See `reference.py`. Raises DeviceError for an input that wants a gradient or a dtype without kernel."""
    native.refuse_gradient("swiglu", gate_TF, up_TF)
    dtype = native.dtype_code("swiglu", gate_TF)
    assert gate_TF.shape == up_TF.shape and gate_TF.dtype == up_TF.dtype
    gate_TF, up_TF = gate_TF.contiguous(), up_TF.contiguous()
    out_TF = torch.empty_like(gate_TF)
    width = gate_TF.shape[-1]
    (kernels or native.best()).swiglu(
        gate_TF.data_ptr(), up_TF.data_ptr(), dtype, gate_TF.numel() // width, width, limit, out_TF.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out_TF if quant is None else fake_quant(out_TF, quant, kernels=kernels)
