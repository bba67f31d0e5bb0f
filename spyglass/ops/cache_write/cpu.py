"""Rows copied or cast where they belong: `csrc/pointwise.cpp`."""

from __future__ import annotations

import torch

from spyglass.errors import DeviceError
from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels

__all__ = ["cache_write", "usable"]


def cache_write(
    pages_NBD: torch.Tensor, rows_TD: torch.Tensor, write_T: torch.Tensor, *, kernels: Kernels | None = None
) -> None:
    """See `reference.py`.

    Raises:
        DeviceError: an input wants a gradient, a dtype has no kernel, or the pages are strided.
    """
    native.refuse_gradient("cache_write", pages_NBD, rows_TD)
    page_dtype, row_dtype = native.dtype_code("cache_write", pages_NBD), native.dtype_code("cache_write", rows_TD)
    if not pages_NBD.is_contiguous():
        raise DeviceError("the CPU kernel of cache_write needs contiguous pages")
    rows_TD, write_T = rows_TD.contiguous(), write_T.to(torch.int64).contiguous()
    (kernels or native.best()).cache_write(
        pages_NBD.data_ptr(), page_dtype, rows_TD.data_ptr(), row_dtype, rows_TD.shape[0], rows_TD.shape[1],
        write_T.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
