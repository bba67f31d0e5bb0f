"""The kernel behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WIDTH = 1024


def gate(x_NF: torch.Tensor, out_NF: torch.Tensor) -> None:
    """Write silu_mul of the rows of x into `out_NF`; both contiguous."""
    rows, width = out_NF.shape
    if out_NF.numel() == 0:
        return
    _gate[(rows, triton.cdiv(width, _WIDTH))](x_NF, out_NF, width, WIDTH=_WIDTH)


@triton.jit
def _gate(x_ptr, out_ptr, width, WIDTH: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = channel < width
    x = tl.load(x_ptr + row * 2 * width + channel, mask=there, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + channel, mask=there, other=0.0).to(tl.float32)
    silu = (x / (1 + tl.exp(-x))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * width + channel, (silu * up).to(out_ptr.dtype.element_ty), mask=there)
