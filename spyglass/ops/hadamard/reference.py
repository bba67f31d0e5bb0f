"""Hadamard rotation (spec v4 5.5): spreads one large channel over all, so that FP4 rounding hurts less."""

from __future__ import annotations

import torch


def hadamard(x_ND: torch.Tensor) -> torch.Tensor:
    """y = H x · D^-1/2 with the Sylvester-ordered ±1 matrix; D a power of two; fp32 inside, output in x's dtype."""
    dim = x_ND.shape[-1]
    assert dim & (dim - 1) == 0, dim
    y, half = x_ND.float(), 1
    while half < dim:
        a, b = y.unflatten(-1, (dim // (2 * half), 2, half)).unbind(-2)
        y, half = torch.stack([a + b, a - b], dim=-2).flatten(-3), 2 * half
    return (y * dim**-0.5).to(x_ND.dtype)
