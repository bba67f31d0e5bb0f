"""On a GPU one launch for each direction: the gradient turns back."""

from __future__ import annotations

from typing import Any

import torch

from spyglass.ops import gpu
from spyglass.ops.rope_half import reference, triton


def rope_half(x_UHD: torch.Tensor, cos_UR: torch.Tensor, sin_UR: torch.Tensor) -> torch.Tensor:
    """See `reference.py`, which also serves fp64."""
    if not gpu.trains(x_UHD):
        return reference.rope_half(x_UHD, cos_UR, sin_UR)
    out_UHD: torch.Tensor = _Turn.apply(x_UHD, cos_UR, sin_UR)  # type: ignore[no-untyped-call]
    return out_UHD


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_UHD: torch.Tensor, cos_UR: torch.Tensor, sin_UR: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_UR, sin_UR)
        return triton.rope_half(x_UHD, cos_UR, sin_UR)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos_UR, sin_UR = ctx.saved_tensors
        return triton.rope_half(grads[0], cos_UR, -sin_UR), None, None
