"""The compiled kernels one after the other."""

from __future__ import annotations

import torch

from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.cache_write.cpu import cache_write
from spyglass.ops.fake_quant.cpu import fake_quant
from spyglass.ops.hadamard.cpu import hadamard as rotate
from spyglass.ops.native import Kernels
from spyglass.ops.rms_norm.cpu import rms_norm
from spyglass.ops.rope_partial.cpu import rope_partial
from spyglass.ops.row_finish.reference import stored_row
from spyglass.quant.formats import FakeQuant, StoredRow

__all__ = ["row_finish", "usable"]


def row_finish(
    x_THD: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    *,
    weight_D: torch.Tensor | None = None,
    eps: float | None = None,
    stepwise: bool = False,
    hadamard: bool = False,
    quant: FakeQuant | None = None,
    dims: int | None = None,
    tail_bf16: bool = False,
    pages_NBD: torch.Tensor | None = None,
    write_T: torch.Tensor | None = None,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """See `reference.py`. Raises DeviceError as its parts do."""
    if eps is not None:
        x_THD = rms_norm(x_THD, weight_D, eps=eps, stepwise=stepwise, kernels=kernels)
    x_THD = rope_partial(x_THD, cos_TR, sin_TR, kernels=kernels)
    if hadamard:
        x_THD = rotate(x_THD, kernels=kernels)
    if pages_NBD is not None and write_T is not None and pages_NBD.dtype == torch.uint8:
        _store(x_THD, stored_row(x_THD, quant, dims), pages_NBD, write_T, kernels or native.best())
        return x_THD
    if quant is not None:
        x_THD = fake_quant(x_THD, quant, dims=dims, tail_bf16=tail_bf16, kernels=kernels)
    if pages_NBD is not None and write_T is not None:
        cache_write(pages_NBD, x_THD, write_T, kernels=kernels)
    return x_THD


def _store(
    rows_TD: torch.Tensor, format: StoredRow, pages_NBX: torch.Tensor, write_T: torch.Tensor, kernels: Kernels
) -> None:
    """Codes of rows straight to their places: `csrc/stored.cpp`."""
    native.refuse_gradient("row_finish", rows_TD)
    rows_TD, write_T = rows_TD.contiguous(), write_T.to(torch.int64).contiguous()
    kernels.store_rows(
        pages_NBX.data_ptr(),
        native.row_code("row_finish", pages_NBX, format),
        rows_TD.data_ptr(),
        native.dtype_code("row_finish", rows_TD),
        *rows_TD.shape,
        write_T.data_ptr(),
        torch.get_num_threads(),
    )
