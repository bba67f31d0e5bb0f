"""Root-mean-square norm (spec v4 3.4 and, without weight, 4.1)."""

from __future__ import annotations

import torch

from spyglass.ops.fake_quant.reference import fake_quant
from spyglass.quant.formats import FakeQuant


def rms_norm(
    x_ND: torch.Tensor,
    weight_D: torch.Tensor | None,
    *,
    eps: float,
    stepwise: bool = False,
    quant: FakeQuant | None = None,
) -> torch.Tensor:
    """out = w · (x · rsqrt(mean x² + eps)), fp32 inside, one rounding to x's dtype at the end.

    With `quant`, what `fake_quant` makes of that. `stepwise` (per-head norm of q, no weight): square, mean, + eps,
    rsqrt and product are each a tensor of x's dtype.
    """
    if quant is not None:
        return fake_quant(rms_norm(x_ND, weight_D, eps=eps, stepwise=stepwise), quant)
    if stepwise:
        assert weight_D is None
        mean = x_ND.square().mean(dim=-1, keepdim=True) + eps
        # torch's rsqrt of bf16 on a CPU rounds twice (root, then reciprocal); on a GPU, as released, once
        return x_ND * torch.rsqrt(mean.float()).to(x_ND.dtype)
    x = x_ND.float()
    x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return (x if weight_D is None else weight_D.float() * x).to(x_ND.dtype)
