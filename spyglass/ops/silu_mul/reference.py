"""The gated unit of the image tower's MLP (spec v4 9.3)."""

from __future__ import annotations

import torch


def silu_mul(x_UF: torch.Tensor) -> torch.Tensor:
    """out = silu(gate) · up for x = [gate | up], [..., 2 F] to [..., F]; silu is rounded to x's dtype first."""
    gate, up = x_UF.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
