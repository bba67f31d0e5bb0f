"""The kernel behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spyglass.ops.gpu import overlap
from spyglass.ops.overlap import begin

_VALUES = 2048  # of a program, where a head is not longer


def turn(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, out_THD: torch.Tensor, inverse: bool) -> None:
    """Write rope_partial of x (channels contiguous) into `out_THD` (contiguous); tables contiguous."""
    rows, heads, dim = x_THD.shape
    if out_THD.numel() == 0:
        return
    pairs = cos_TR.shape[1]
    PLAIN = triton.next_power_of_2(max(dim - 2 * pairs, 1))
    HEADS = min(max(_VALUES // PLAIN, 1), triton.next_power_of_2(heads))
    _turn_heads[(rows, triton.cdiv(heads, HEADS))](
        x_THD,
        cos_TR,
        sin_TR,
        out_THD,
        x_THD.stride(0),
        x_THD.stride(1),
        heads,
        dim,
        INVERSE=inverse,
        HEADS=HEADS,
        PLAIN=PLAIN,
        PAIRS=pairs,
        enable_fp_fusion=False,  # products are rounded before they are added, as in the reference
        **overlap(x_THD),
    )


@triton.jit
def _turn_heads(
    x_ptr, cos_ptr, sin_ptr, out_ptr, row_stride, head_stride, heads, dim,
    INVERSE: tl.constexpr, HEADS: tl.constexpr, PLAIN: tl.constexpr, PAIRS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    from_ptr = x_ptr + row * row_stride + head * head_stride
    to_ptr = out_ptr + (row * heads + head) * dim
    plain = tl.arange(0, PLAIN)[None, :]
    there = (head < heads) & (plain < dim - 2 * PAIRS)
    tl.store(to_ptr + plain, tl.load(from_ptr + plain, mask=there), mask=there)
    pair = tl.arange(0, PAIRS)[None, :]
    cos = tl.load(cos_ptr + row * PAIRS + pair)
    sin = tl.load(sin_ptr + row * PAIRS + pair)
    last = dim - 2 * PAIRS + tl.arange(0, 2 * PAIRS)[None, :]
    x = tl.load(from_ptr + last, mask=head < heads, other=0.0).to(tl.float32)
    x = turn_pairs(x, cos, -sin if INVERSE else sin, HEADS, PAIRS)
    tl.store(to_ptr + last, x.to(out_ptr.dtype.element_ty), mask=head < heads)


@triton.jit
def turn_pairs(x, cos, sin, ROWS: tl.constexpr, PAIRS: tl.constexpr) -> tl.tensor:
    """(a, b) -> (a cos - b sin, a sin + b cos) for pairs (2i, 2i + 1) of x [ROWS, 2 PAIRS]; cos, sin [.., PAIRS]."""
    a, b = tl.split(tl.reshape(x, (ROWS, PAIRS, 2)))
    return tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (ROWS, 2 * PAIRS))
