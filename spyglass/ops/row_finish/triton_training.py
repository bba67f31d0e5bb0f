"""The gradient through rotation, Hadamard product and norm in one launch; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spyglass.ops.hadamard.triton_kernel import rotate_rows
from spyglass.ops.rms_norm.triton_training import through_norm
from spyglass.ops.rope_partial.triton_kernel import turn_pairs

_VALUES = 2048  # of a program, where a row is not longer


def finish_gradient(
    x_THD: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    grad_THD: torch.Tensor,
    dx_THD: torch.Tensor,
    *,
    weight_D: torch.Tensor | None,
    eps: float | None,
    stepwise: bool,
    hadamard: bool,
) -> None:
    """Write the gradient of x; rounding counts as the identity. Channels of x contiguous, the others all."""
    rows, heads, dim = x_THD.shape
    if x_THD.numel() == 0:
        return
    HEADS = min(max(_VALUES // dim, 1), triton.next_power_of_2(heads))
    _finish_gradient[(rows, triton.cdiv(heads, HEADS))](
        x_THD, cos_TR, sin_TR, grad_THD, dx_THD, cos_TR if weight_D is None else weight_D, x_THD.stride(0),
        x_THD.stride(1), heads, 0.0 if eps is None else eps,
        NORMS=eps is not None, WEIGHTED=weight_D is not None, STEPWISE=stepwise, HADAMARD=hadamard, HEADS=HEADS,
        DIM=dim, LOG_DIM=dim.bit_length() - 1, PAIRS=cos_TR.shape[1], num_warps=4 if HEADS * dim > 512 else 2,
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _finish_gradient(
    x_ptr, cos_ptr, sin_ptr, grad_ptr, dx_ptr, weight_ptr, row_stride, head_stride, heads, eps,
    NORMS: tl.constexpr, WEIGHTED: tl.constexpr, STEPWISE: tl.constexpr, HADAMARD: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, LOG_DIM: tl.constexpr, PAIRS: tl.constexpr,
) -> None:  # fmt: skip
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, DIM)[None, :]
    there = head < heads
    place = (row * heads + head) * DIM + channel
    grad = tl.load(grad_ptr + place, mask=there, other=0.0).to(tl.float32)
    if HADAMARD:
        grad = rotate_rows(grad, HEADS, DIM, LOG_DIM)
    pair = tl.arange(0, DIM // 2)[None, :] - (DIM // 2 - PAIRS)
    cos = tl.load(cos_ptr + row * PAIRS + pair, mask=pair >= 0, other=1.0)
    sin = tl.load(sin_ptr + row * PAIRS + pair, mask=pair >= 0, other=0.0)
    grad = turn_pairs(grad, cos, -sin, HEADS, DIM // 2)
    if NORMS:
        x = tl.load(x_ptr + row * row_stride + head * head_stride + channel, mask=there, other=0.0).to(tl.float32)
        if WEIGHTED:
            grad *= tl.load(weight_ptr + channel).to(tl.float32)
        grad = through_norm(x, grad, DIM, eps, STEPWISE, DTYPE)
    tl.store(dx_ptr + place, grad.to(DTYPE), mask=there)
