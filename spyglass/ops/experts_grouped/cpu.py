"""All routed experts of a layer in one call: `csrc/experts.cpp`."""

from __future__ import annotations

import torch

from spyglass.errors import DeviceError
from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels
from spyglass.quant.formats import FakeQuant
from spyglass.quant.packed import Packed

__all__ = ["experts_grouped", "usable"]


def experts_grouped(
    x_TC: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    w1: Packed,
    w3: Packed,
    w2: Packed,
    *,
    limit: float,
    rounding: FakeQuant | None = None,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """See `reference.py`. Each chosen expert's weights are read once; the sum over experts has a fixed order.

    Raises:
        DeviceError: an input wants a gradient, or formats, a dtype or a block size have no kernel.
    """
    native.refuse_gradient("experts_grouped", x_TC, weights_TK, w1.data, w3.data, w2.data)
    dtype = native.dtype_code("experts_grouped", x_TC)
    if not w1.format == w3.format == w2.format:
        raise DeviceError(
            "the CPU kernel of experts_grouped needs one format for all three matrices, not "
            f"{w1.format.name}, {w3.format.name} and {w2.format.name}"
        )
    experts, width, hidden = w1.shape
    rows, chosen = ids_TK.shape
    x_TC, ids_TK, weights_TK = x_TC.contiguous(), native.int32(ids_TK), native.float32(weights_TK)
    out_TC = torch.empty((rows, hidden), dtype=torch.float32)
    (kernels or native.best()).experts(
        x_TC.data_ptr(),
        dtype,
        rows,
        chosen,
        ids_TK.data_ptr(),
        weights_TK.data_ptr(),
        w1.data.data_ptr(),
        w3.data.data_ptr(),
        w2.data.data_ptr(),
        native.address(w1.scale),
        native.address(w3.scale),
        native.address(w2.scale),
        experts,
        width,
        hidden,
        *native.weight_codes("experts_grouped", w1),
        limit,
        *native.quant_codes(rounding),
        out_TC.data_ptr(),
        torch.get_num_threads(),
    )
    return out_TC
