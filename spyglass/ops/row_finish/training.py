"""As the reference, with a gradient through the rounding."""

from __future__ import annotations

import torch

from spyglass.ops.cache_write.reference import cache_write
from spyglass.ops.fake_quant.training import fake_quant
from spyglass.ops.hadamard.reference import hadamard as rotate
from spyglass.ops.rms_norm.reference import rms_norm
from spyglass.ops.rope_partial.reference import rope_partial
from spyglass.quant.formats import FakeQuant


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
    """See `reference.py`."""
    if eps is not None:
        x_THD = rms_norm(x_THD, weight_D, eps=eps, stepwise=stepwise)
    x_THD = rope_partial(x_THD, cos_TR, sin_TR)
    if hadamard:
        x_THD = rotate(x_THD)
    if quant is not None:
        x_THD = fake_quant(x_THD, quant, dims=dims, tail_bf16=tail_bf16)
    if pages_NBD is not None and write_T is not None:
        cache_write(pages_NBD, x_THD, write_T)
    return x_THD
