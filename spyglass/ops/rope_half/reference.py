"""Rotary embedding of all channels, half-split pairs, as the image tower turns its q and k (spec v4 9.3)."""

from __future__ import annotations

import torch


def rope_half(x_UHD: torch.Tensor, cos_UR: torch.Tensor, sin_UR: torch.Tensor) -> torch.Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) for channels (d, d + D / 2), fp32 inside, one rounding to x's dtype.

    `x_UHD` may have strided rows and heads; `cos_UR`, `sin_UR` fp32 [U, D / 2]. Returns a new tensor.
    """
    a, b = x_UHD.float().chunk(2, dim=-1)
    cos, sin = cos_UR[:, None], sin_UR[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_UHD.dtype)
