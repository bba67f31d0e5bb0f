"""What stands between a product and a row that is stored or compared: norm, rotation, roundings, the write."""

from __future__ import annotations

import torch

from spyglass.ops.cache_write.reference import cache_write
from spyglass.ops.fake_quant.reference import fake_quant
from spyglass.ops.hadamard.reference import hadamard as rotate
from spyglass.ops.rms_norm.reference import rms_norm
from spyglass.ops.rope_partial.reference import rope_partial
from spyglass.quant.formats import FakeQuant, StoredRow
from spyglass.quant.rows import encode_rows


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
) -> torch.Tensor:
    """rms_norm (where `eps` is given), rope_partial, hadamard, fake_quant and cache_write, one after the other.

    `x_THD` [T, H, D] or, always where `pages_NBD` is given, [T, D]. Each step rounds to x's dtype. Pages that are bytes
    get codes and scales (`stored_row`) where plain ones get rounded numbers. Returns the rows, as they were before they
    became codes.
    """
    if eps is not None:
        x_THD = rms_norm(x_THD, weight_D, eps=eps, stepwise=stepwise)
    x_THD = rope_partial(x_THD, cos_TR, sin_TR)
    if hadamard:
        x_THD = rotate(x_THD)
    if pages_NBD is not None and write_T is not None and pages_NBD.dtype == torch.uint8:
        cache_write(pages_NBD, encode_rows(x_THD, stored_row(x_THD, quant, dims)), write_T)
        return x_THD
    if quant is not None:
        x_THD = fake_quant(x_THD, quant, dims=dims, tail_bf16=tail_bf16)
    if pages_NBD is not None and write_T is not None:
        cache_write(pages_NBD, x_THD, write_T)
    return x_THD


def stored_row(x_TD: torch.Tensor, quant: FakeQuant | None, dims: int | None) -> StoredRow:
    """The format that pages of bytes hold these rows in."""
    assert quant is not None, "rows that are not rounded cannot be stored as codes"
    dim = x_TD.shape[-1]
    return StoredRow(quant=quant, dim=dim, dims=dim if dims is None else dims)
