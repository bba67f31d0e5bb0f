"""One launch; rows without a place are skipped on the device."""

from __future__ import annotations

import torch

from spyglass.ops.cache_write import reference
from spyglass.ops.gpu import overlap, usable

__all__ = ["cache_write", "usable"]

_CHANNELS = 1024  # of one program


def cache_write(pages_NBD: torch.Tensor, rows_TD: torch.Tensor, write_T: torch.Tensor) -> None:
    """See `reference.py`, which also serves pages that are not contiguous."""
    if not pages_NBD.is_contiguous() or rows_TD.stride(-1) != 1:
        reference.cache_write(pages_NBD, rows_TD, write_T)
        return
    from spyglass.ops.cache_write.triton_kernel import write_row

    rows, dim = rows_TD.shape
    if rows_TD.numel() == 0:
        return
    dims = min(1 << (dim - 1).bit_length(), _CHANNELS)
    write_row[(rows, -(-dim // dims))](
        pages_NBD, rows_TD.detach(), write_T, rows_TD.stride(0),
        DIM=dim, DIMS=dims, num_warps=4 if dims > 256 else 1, **overlap(rows_TD),
    )  # fmt: skip
