"""On a GPU a launch for each direction, where the reference makes seven passes and twice as many back."""

from __future__ import annotations

from typing import Any

import torch

from spyglass.ops import gpu
from spyglass.ops.rms_norm import reference, triton
from spyglass.quant.formats import FakeQuant


def rms_norm(
    x_ND: torch.Tensor,
    weight_D: torch.Tensor | None,
    *,
    eps: float,
    stepwise: bool = False,
    quant: FakeQuant | None = None,
) -> torch.Tensor:
    """See `reference.py`, which also serves a weight that is trained, fp64 and very wide rows."""
    trained = weight_D is not None and weight_D.requires_grad
    if quant is not None or trained or not (gpu.trains(x_ND) and triton.suits(x_ND)):
        return reference.rms_norm(x_ND, weight_D, eps=eps, stepwise=stepwise, quant=quant)
    out_ND: torch.Tensor = _Norm.apply(x_ND, weight_D, eps, stepwise)  # type: ignore[no-untyped-call]
    return out_ND


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: torch.Tensor, weight_D: torch.Tensor | None, eps: float, stepwise: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x_ND, weight_D)
        ctx.eps, ctx.stepwise = eps, stepwise
        return triton.rms_norm(x_ND, weight_D, eps=eps, stepwise=stepwise)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        from spyglass.ops.rms_norm.triton_training import norm_gradient

        x_ND, weight_D = ctx.saved_tensors
        dx_ND = torch.empty(x_ND.shape, dtype=x_ND.dtype, device=x_ND.device)
        flat = x_ND.reshape(-1, x_ND.shape[-1])
        grad = grads[0].contiguous().view(flat.shape)
        norm_gradient(flat, weight_D, grad, dx_ND.view(flat.shape), ctx.eps, ctx.stepwise)
        return dx_ND, None, None, None
