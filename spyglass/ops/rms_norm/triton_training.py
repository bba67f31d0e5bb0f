"""The gradient of the norm in one launch; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spyglass.ops.rms_norm.triton_kernel import inverse_size

_VALUES = 2048  # of a program, where a row is not longer


def norm_gradient(
    x_ND: torch.Tensor,
    weight_D: torch.Tensor | None,
    grad_ND: torch.Tensor,
    dx_ND: torch.Tensor,
    eps: float,
    stepwise: bool,
) -> None:
    """With r = rsqrt(mean x² + eps):  dx = r (w g - x r² mean(x w g)). `dx_ND` and `grad_ND` contiguous."""
    rows, dim = x_ND.shape
    if x_ND.numel() == 0:
        return
    DIM = triton.next_power_of_2(dim)
    ROWS = max(_VALUES // DIM, 1)
    _norm_gradient[(triton.cdiv(rows, ROWS),)](
        x_ND, x_ND if weight_D is None else weight_D, grad_ND, dx_ND, rows, x_ND.stride(0), dim, eps,
        WEIGHTED=weight_D is not None, STEPWISE=stepwise, ROWS=ROWS, DIM=DIM, num_warps=4 if DIM <= 4096 else 8,
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _norm_gradient(
    x_ptr, weight_ptr, grad_ptr, dx_ptr, rows, row_stride, dim, eps,
    WEIGHTED: tl.constexpr, STEPWISE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
) -> None:  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    channel = tl.arange(0, DIM)[None, :]
    there = (row < rows) & (channel < dim)
    x = tl.load(x_ptr + row * row_stride + channel, mask=there, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * dim + channel, mask=there, other=0.0).to(tl.float32)
    if WEIGHTED:
        grad *= tl.load(weight_ptr + channel, mask=channel < dim, other=0.0).to(tl.float32)
    dx = through_norm(x, grad, dim, eps, STEPWISE, dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + row * dim + channel, dx.to(dx_ptr.dtype.element_ty), mask=there)


@triton.jit
def through_norm(x, grad, dim, eps, STEPWISE: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """The gradient of x [R, D] fp32 from that of x · rsqrt(mean x² + eps)."""
    size = inverse_size(x, dim, eps, STEPWISE, DTYPE)[:, None]
    share = tl.sum(x * grad, axis=1)[:, None] / dim
    return size * (grad - x * (size * size * share))
