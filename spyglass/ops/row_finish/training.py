"""As the reference, with a gradient through the rounding; on a GPU a launch for each direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from spyglass.ops import gpu
from spyglass.ops.cache_write.reference import cache_write
from spyglass.ops.fake_quant.training import fake_quant
from spyglass.ops.hadamard.reference import hadamard as rotate
from spyglass.ops.rms_norm.reference import rms_norm
from spyglass.ops.rope_partial.reference import rope_partial
from spyglass.ops.row_finish import triton
from spyglass.quant.formats import FakeQuant


def row_finish(
    x_THD: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    *,
    weight_D: torch.Tensor | None = None,
    eps: float | None = None,
    stepwise: bool = False,
    hadamard: bool = False,
    quant: FakeQuant | None = None,
    dims: int | None = None,
    tail_bf16: bool = False,
    pages_NBD: torch.Tensor | None = None,
    write_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.py`."""
    whole = x_THD.shape[-1] if dims is None else dims
    trained = weight_D is not None and weight_D.requires_grad
    if gpu.trains(x_THD) and not trained and triton.suits(x_THD, cos_TR, quant, whole):
        how = _How(weight_D, cos_TR, sin_TR, eps, stepwise, hadamard, quant, dims, tail_bf16)
        out_THD: torch.Tensor = _Finish.apply(x_THD, how)  # type: ignore[no-untyped-call]
        if pages_NBD is not None and write_T is not None:
            cache_write(pages_NBD, out_THD, write_T)
        return out_THD
    if eps is not None:
        x_THD = rms_norm(x_THD, weight_D, eps=eps, stepwise=stepwise)
    x_THD = rope_partial(x_THD, cos_TR, sin_TR)
    if hadamard:
        x_THD = rotate(x_THD)
    if quant is not None:
        x_THD = fake_quant(x_THD, quant, dims=dims, tail_bf16=tail_bf16)
    if pages_NBD is not None and write_T is not None:
        cache_write(pages_NBD, x_THD, write_T)
    return x_THD


@dataclass(frozen=True, slots=True)
class _How:
    """What has no gradient."""

    weight_D: torch.Tensor | None
    cos_TR: torch.Tensor
    sin_TR: torch.Tensor
    eps: float | None
    stepwise: bool
    hadamard: bool
    quant: FakeQuant | None
    dims: int | None
    tail_bf16: bool


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: torch.Tensor, how: _How) -> torch.Tensor:
        ctx.save_for_backward(x_THD)
        ctx.how = how
        return triton.row_finish(
            x_THD,
            how.cos_TR,
            how.sin_TR,
            weight_D=how.weight_D,
            eps=how.eps,
            stepwise=how.stepwise,
            hadamard=how.hadamard,
            quant=how.quant,
            dims=how.dims,
            tail_bf16=how.tail_bf16,
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x_THD,), how = ctx.saved_tensors, ctx.how
        dx_THD = gradient_of_rows(
            x_THD,
            how.cos_TR,
            how.sin_TR,
            grads[0],
            weight_D=how.weight_D,
            eps=how.eps,
            stepwise=how.stepwise,
            hadamard=how.hadamard,
        )
        return dx_THD, None


def gradient_of_rows(
    x_THD: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    grad_THD: torch.Tensor,
    *,
    weight_D: torch.Tensor | None = None,
    eps: float | None = None,
    stepwise: bool = False,
    hadamard: bool = False,
) -> torch.Tensor:
    """The gradient of x [T, H, D] or [T, D] from that of `row_finish`, in one launch."""
    from spyglass.ops.row_finish.triton_training import finish_gradient

    dx_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    each = (x_THD, grad_THD.contiguous(), dx_THD)
    x, grad, dx = each if x_THD.dim() == 3 else (part[:, None] for part in each)
    tables = cos_TR.contiguous(), sin_TR.contiguous()
    finish_gradient(x, *tables, grad, dx, weight_D=weight_D, eps=eps, stepwise=stepwise, hadamard=hadamard)
    return dx_THD
