"""The kernel behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from spyglass.ops.overlap import begin


@triton.jit(do_not_specialize=("row_stride",))
def write_row(
    pages_ptr, rows_ptr, write_ptr, row_stride: tl.int64, DIM: tl.constexpr, DIMS: tl.constexpr, OVERLAPS: tl.constexpr
) -> None:
    """One row to its place, if it has one."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    to = tl.load(write_ptr + row)
    channel = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    there = channel < tl.where(to >= 0, DIM, 0)
    x = tl.load(rows_ptr + row * row_stride + channel, mask=there, other=0.0)
    tl.store(pages_ptr + to * DIM + channel, x.to(pages_ptr.dtype.element_ty), mask=there)
