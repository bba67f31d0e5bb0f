"""The kernel behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("row_stride", "head_stride"))
def turn_rows(
    x_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.int64,
    head_stride: tl.int64,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Some heads of one row; the leading pairs of channels are multiplied by 1 and 0."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, 2 * PAIRS)
    there = (head < NUM_HEADS)[:, None] & (channel < DIM)[None, :]
    x = tl.load(x_ptr + row * row_stride + head[:, None] * head_stride + channel[None, :], mask=there, other=0.0)
    pair = tl.arange(0, PAIRS) - (DIM - TURNED) // 2
    turned = (pair >= 0) & (pair < TURNED // 2)
    cos = tl.load(cos_ptr + row * (TURNED // 2) + pair, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + row * (TURNED // 2) + pair, mask=turned, other=0.0)
    if INVERSE:
        sin = -sin
    a, b = tl.split(tl.reshape(x.to(tl.float32), (HEADS, PAIRS, 2)))
    c, s = cos[None, :], sin[None, :]
    out = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (HEADS, 2 * PAIRS)).to(out_ptr.dtype.element_ty)
    out = tl.where((channel < DIM - TURNED)[None, :], x, out)
    tl.store(out_ptr + (row * NUM_HEADS + head)[:, None] * DIM + channel[None, :], out, mask=there)
