"""On a GPU one launch for each direction."""

from __future__ import annotations

from typing import Any

import torch

from spyglass.ops import gpu
from spyglass.ops.silu_mul import reference, triton


def silu_mul(x_UF: torch.Tensor) -> torch.Tensor:
    """See `reference.py`, which also serves fp64."""
    if not gpu.trains(x_UF):
        return reference.silu_mul(x_UF)
    out_UF: torch.Tensor = _Gate.apply(x_UF)  # type: ignore[no-untyped-call]
    return out_UF


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_UF: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_UF)
        return triton.silu_mul(x_UF)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        from spyglass.ops.silu_mul.triton_training import gate_gradient

        x_UF = ctx.saved_tensors[0].contiguous()
        dx_UF = torch.empty_like(x_UF)
        flat = x_UF.view(-1, x_UF.shape[-1])
        gate_gradient(flat, grads[0].contiguous().view(len(flat), -1), dx_UF.view(flat.shape))
        return dx_UF
