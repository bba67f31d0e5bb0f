"""The product without its results: each task keeps the largest of its rows, `csrc/linear.cpp`."""

from __future__ import annotations

import torch

from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels
from spyglass.quant.packed import Packed

__all__ = ["linear_argmax", "usable"]

CAPABILITIES = frozenset({"capturable", "saves_logits"})

_MOST = 1 << 24  # outputs whose numbers a float holds


def linear_argmax(
    x_TI: torch.Tensor, weight: Packed, skip_O: torch.Tensor, *, kernels: Kernels | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.py`. What it compares are the bits that `linear_block` would give in fp32.

    Raises:
        DeviceError: an input wants a gradient, or a dtype or block size has no kernel.
    """
    native.refuse_gradient("linear_argmax", x_TI, weight.data)
    dtype = native.dtype_code("linear_argmax", x_TI)
    x_TI, skip_O = x_TI.contiguous(), skip_O.contiguous()
    rows, out_features = len(x_TI), weight.shape[0]
    assert skip_O.dtype == torch.bool and len(skip_O) == out_features < _MOST
    values_T, places_T = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    (kernels or native.best()).linear_argmax(
        x_TI.data_ptr(), dtype, rows, *native.matrix_arguments("linear_argmax", weight), *native.NO_QUANT,
        skip_O.data_ptr(), values_T.data_ptr(), places_T.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return places_T, values_T
