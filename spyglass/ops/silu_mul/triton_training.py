"""The gradient of the gated unit in one launch; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WIDTH = 1024


def gate_gradient(x_NF: torch.Tensor, grad_NF: torch.Tensor, dx_NF: torch.Tensor) -> None:
    """Write the gradient of [gate | up]; all contiguous. silu counts as rounded where it is a factor."""
    rows, width = grad_NF.shape
    if grad_NF.numel():
        _gate_gradient[(rows, triton.cdiv(width, _WIDTH))](x_NF, grad_NF, dx_NF, width, WIDTH=_WIDTH)


@triton.jit
def _gate_gradient(x_ptr, grad_ptr, dx_ptr, width, WIDTH: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = channel < width
    first = row * 2 * width + channel
    x = tl.load(x_ptr + first, mask=there, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + first + width, mask=there, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * width + channel, mask=there, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-x))
    silu = (x * share).to(dx_ptr.dtype.element_ty).to(tl.float32)
    dx = grad * up * (share * (1 + x * (1 - share)))
    tl.store(dx_ptr + first, dx.to(dx_ptr.dtype.element_ty), mask=there)
    tl.store(dx_ptr + first + width, (grad * silu).to(dx_ptr.dtype.element_ty), mask=there)
