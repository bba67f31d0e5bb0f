"""Which output of a linear map is the largest, for those who need no other (greedy answers)."""

from __future__ import annotations

import torch

from spyglass.ops.linear_block.reference import linear_block
from spyglass.quant.packed import Packed


def linear_argmax(x_TI: torch.Tensor, weight: Packed, skip_O: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """places_T int64 and values_T fp32 of max_o (x · Wᵀ)_to over all o that `skip_O` (bool) does not name.

    The first of equals; a NaN counts as larger than every number.
    """
    y_TO = linear_block(x_TI, weight, out_dtype=torch.float32).masked_fill(skip_O, float("-inf"))
    places_T = y_TO.argmax(dim=-1)
    return places_T, y_TO.gather(1, places_T[:, None])[:, 0]
