"""Softmax and weighted sum per channel, rows read where they lie: `csrc/pointwise.cpp`."""

from __future__ import annotations

import torch

from spyglass.errors import DeviceError
from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels

__all__ = ["compress_pool", "usable"]


def compress_pool(
    rows_TE: torch.Tensor,
    state_NE: torch.Tensor | None,
    sources_PB: torch.Tensor,
    *,
    overlap: bool,
    out_dtype: torch.dtype = torch.float32,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """See `reference.py`. An entry without any source is zero.

    Raises:
        DeviceError: an input wants a gradient, or rows are not float32.
    """
    native.refuse_gradient("compress_pool", rows_TE, state_NE)
    for rows in (rows_TE, state_NE):
        if rows is not None and rows.dtype != torch.float32:
            raise DeviceError(f"the CPU kernel of compress_pool takes float32 rows, not {rows.dtype}")
    rows_TE, sources_PB = rows_TE.contiguous(), native.int32(sources_PB)
    if state_NE is not None:
        state_NE = state_NE.contiguous()
    entries, width = sources_PB.shape[0], rows_TE.shape[1]
    out_PD = torch.empty((entries, width // 4 if overlap else width // 2), dtype=out_dtype)
    (kernels or native.best()).compress_pool(
        rows_TE.data_ptr(), native.address(state_NE), sources_PB.data_ptr(), entries, sources_PB.shape[1], width,
        overlap, out_PD.data_ptr(), native.dtype_code("compress_pool", out_PD), torch.get_num_threads(),
    )  # fmt: skip
    return out_PD
