"""The kernel behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def normalise(x_ND: torch.Tensor, weight_D: torch.Tensor | None, out_ND: torch.Tensor, eps: float) -> None:
    """Write rms_norm of the rows of x (channels contiguous) into `out_ND` (contiguous)."""
    rows, dim = x_ND.shape
    if rows == 0:
        return
    weight = x_ND if weight_D is None else weight_D
    _normalise_row[(rows,)](
        x_ND,
        weight,
        out_ND,
        x_ND.stride(0),
        dim,
        eps,
        WEIGHTED=weight_D is not None,
        DIM=triton.next_power_of_2(dim),
        num_warps=4 if dim <= 4096 else 8,
    )


@triton.jit
def _normalise_row(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    dim: tl.tensor,
    eps: tl.tensor,
    WEIGHTED: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, DIM)
    there = channel < dim
    x = tl.load(x_ptr + row * row_stride + channel, mask=there, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / dim + eps)
    if WEIGHTED:
        x = tl.load(weight_ptr + channel, mask=there, other=0.0).to(tl.float32) * x
    tl.store(out_ptr + row * dim + channel, x.to(out_ptr.dtype.element_ty), mask=there)
