"""A block-diagonal linear: group g of the output reads only group g of the input (`wo_a`, spec v4 4.6)."""

from __future__ import annotations

import torch

from spyglass.quant.codec import decode
from spyglass.quant.packed import Packed


def linear_grouped(x_TGI: torch.Tensor, weight: Packed, *, addend_TGO: torch.Tensor | None = None) -> torch.Tensor:
    """out_TGO = sum_i x_TGI · W_GOI, fp32 accumulation, one rounding to x's dtype; the input is never re-quantised.

    `weight` is stored [G * O, I]; rows g * O .. (g + 1) * O belong to group g.
    """
    groups = x_TGI.shape[1]
    weight_GOI = decode(weight, torch.float32).view(groups, -1, x_TGI.shape[2])
    out_TGO = torch.einsum("tgi,goi->tgo", x_TGI.float(), weight_GOI)
    if addend_TGO is not None:
        out_TGO = out_TGO + addend_TGO
    return out_TGO.to(x_TGI.dtype)
