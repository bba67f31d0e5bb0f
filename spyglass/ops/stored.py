"""Rows of codes (`quant.formats.StoredRow`) as Triton kernels are told of them; needs no Triton."""

from __future__ import annotations

import torch

from spyglass.errors import DeviceError
from spyglass.quant.formats import StoredRow

_WIDEST = 1024  # every number of a row's layout takes 12 bits


def suits(pages: torch.Tensor, format: StoredRow | None, dtype: torch.dtype) -> bool:
    """Whether kernels of activations in `dtype` take these pages: plain rows of it, or codes in whole blocks."""
    if not pages.is_contiguous():
        return False
    if pages.dtype != torch.uint8:
        return pages.dtype == dtype
    if format is None:
        return True  # `row_code` says what is wrong with them
    block, dim = format.quant.block, format.dim
    powers = all(size & (size - 1) == 0 for size in (block, dim))
    return powers and 2 <= block <= dim and 16 <= dim <= _WIDEST and format.dims % block == 0


def row_code(op: str, pages: torch.Tensor, format: StoredRow | None) -> int:
    """What a kernel must know of the rows of these pages as one number, 0 = plain rows; `stored_kernel.py` takes it
    apart.

    Raises:
        DeviceError: bytes of no format or of another width.
    """
    if pages.dtype != torch.uint8:
        return 0
    if format is None or pages.shape[-1] != format.row_bytes:
        raise DeviceError(f"the Triton kernel of {op} cannot read rows of {pages.shape[-1]} bytes as {format}")
    kinds = int(format.quant.element == "e4m3") | int(format.quant.scale == "e4m3") << 1
    code = 0
    for number in (format.row_bytes, format.scales_at, format.tail_at, format.dims, format.quant.block):
        code = code << 12 | number
    return code << 2 | kinds
