"""Rotary embedding of the last R channels, interleaved pairs (spec v4 4.3)."""

from __future__ import annotations

import torch


def rope_partial(
    x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, *, inverse: bool = False
) -> torch.Tensor:
    """(a, b) -> (a cos - b sin, a sin + b cos) for pairs (2i, 2i + 1) of the last channels; `inverse` turns back.

    `x_THD` [T, H, D] (or [T, D]); `cos_TR`, `sin_TR` fp32 [T, R / 2]. fp32 inside, one rounding to x's dtype; the
    leading channels pass unchanged. Returns a new tensor.
    """
    pairs = cos_TR.shape[-1]
    view = (len(x_THD), *(1,) * (x_THD.dim() - 2), pairs)
    cos, sin = cos_TR.view(view), sin_TR.view(view)
    if inverse:
        sin = -sin
    plain, turned = x_THD[..., : -2 * pairs], x_THD[..., -2 * pairs :]
    a, b = turned.float().unflatten(-1, (pairs, 2)).unbind(-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    return torch.cat([plain, turned.to(x_THD.dtype)], dim=-1)
