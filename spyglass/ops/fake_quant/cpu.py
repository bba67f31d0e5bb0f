"""One pass per block, vectorised rounding: `csrc/quantise.h`."""

from __future__ import annotations

import torch

from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels
from spyglass.quant.formats import FakeQuant

__all__ = ["fake_quant", "usable"]


def fake_quant(
    x_ND: torch.Tensor,
    spec: FakeQuant,
    *,
    dims: int | None = None,
    tail_bf16: bool = False,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """See `reference.py`. Raises DeviceError for an input that wants a gradient or a dtype without kernel."""
    native.refuse_gradient("fake_quant", x_ND)
    dtype = native.dtype_code("fake_quant", x_ND)
    x_ND = x_ND.contiguous()
    out_ND = torch.empty_like(x_ND)
    width = x_ND.shape[-1]
    (kernels or native.best()).fake_quant(
        x_ND.data_ptr(), dtype, x_ND.numel() // width, width, width if dims is None else dims,
        *native.quant_codes(spec), tail_bf16, out_ND.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out_ND
