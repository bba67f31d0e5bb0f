"""y = x Wᵀ for a weight in any format, with the model's own rounding of the input (spec v4 2.5)."""

from __future__ import annotations

import torch

from spyglass.ops.fake_quant.reference import fake_quant
from spyglass.quant.codec import decode
from spyglass.quant.formats import FakeQuant
from spyglass.quant.packed import Packed


def linear_block(
    x_TI: torch.Tensor,
    weight: Packed,
    *,
    rounding: FakeQuant | None = None,
    addend_TO: torch.Tensor | None = None,
    bias_O: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """out_TO = round(x)_TI · W_OIᵀ + addend_TO + bias_O, accumulated in fp32 and rounded once.

    `x_TI` [..., in] of the activation dtype; `rounding` is applied to it first. `addend_TO` fp32 joins before the one
    rounding (adapters). Output has `out_dtype`, by default x's. Products of e4m3 / e2m1 codes and their power-of-two
    scales are exact in fp32, so decoding first equals the blockwise fp8 product up to the order of the sum.
    """
    x = x_TI if rounding is None else fake_quant(x_TI, rounding)
    out = x.float() @ decode(weight, torch.float32).mT
    if bias_O is not None:
        out = out + bias_O.float()
    if addend_TO is not None:
        out = out + addend_TO
    return out.to(x_TI.dtype if out_dtype is None else out_dtype)
