"""The kernel behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def turn(x_UHD: torch.Tensor, cos_UR: torch.Tensor, sin_UR: torch.Tensor, out_UHD: torch.Tensor) -> None:
    """Write rope_half of x into `out_UHD` (contiguous); tables contiguous, channels of x contiguous."""
    rows, heads, dim = x_UHD.shape
    if out_UHD.numel() == 0:
        return
    half = dim // 2
    _turn_row[(rows,)](
        x_UHD,
        cos_UR,
        sin_UR,
        out_UHD,
        x_UHD.stride(0),
        x_UHD.stride(1),
        heads,
        half,
        HEADS=triton.next_power_of_2(heads),
        HALF=triton.next_power_of_2(half),
        enable_fp_fusion=False,  # products are rounded before they are added, as in the reference
    )


@triton.jit
def _turn_row(
    x_ptr, cos_ptr, sin_ptr, out_ptr, row_stride, head_stride, heads, half, HEADS: tl.constexpr, HALF: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    there = (head < heads) & (pair < half)
    first = x_ptr + row * row_stride + head * head_stride + pair
    a = tl.load(first, mask=there, other=0.0).to(tl.float32)
    b = tl.load(first + half, mask=there, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * half + pair, mask=pair < half, other=0.0)
    sin = tl.load(sin_ptr + row * half + pair, mask=pair < half, other=0.0)
    to = out_ptr + (row * heads + head) * 2 * half + pair
    tl.store(to, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=there)
    tl.store(to + half, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=there)
