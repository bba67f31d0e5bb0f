"""The kernel behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spyglass.ops.gpu import overlap
from spyglass.ops.overlap import begin

_VALUES = 2048  # of a program, where a row is not longer


def rotate(x_ND: torch.Tensor, out_ND: torch.Tensor) -> None:
    """Write hadamard of the rows of x into `out_ND`; both contiguous."""
    rows, dim = x_ND.shape
    if rows == 0:
        return
    ROWS = max(_VALUES // dim, 1)
    _rotate[(triton.cdiv(rows, ROWS),)](
        x_ND, out_ND, rows,
        ROWS=ROWS, DIM=dim, LOG_DIM=dim.bit_length() - 1, enable_fp_fusion=False, **overlap(x_ND),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _rotate(
    x_ptr, out_ptr, rows, ROWS: tl.constexpr, DIM: tl.constexpr, LOG_DIM: tl.constexpr, OVERLAPS: tl.constexpr
) -> None:
    begin(OVERLAPS)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    at = row * DIM + tl.arange(0, DIM)[None, :]
    x = tl.load(x_ptr + at, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, rotate_rows(x, ROWS, DIM, LOG_DIM).to(out_ptr.dtype.element_ty), mask=row < rows)


@triton.jit
def rotate_rows(x, ROWS: tl.constexpr, DIM: tl.constexpr, LOG_DIM: tl.constexpr) -> tl.tensor:
    """H x · DIM^-1/2 of each row of x [ROWS, DIM], fp32."""
    for stage in tl.static_range(LOG_DIM):
        halves = tl.reshape(x, (ROWS, DIM >> (stage + 1), 2, 1 << stage))
        a, b = tl.split(tl.permute(halves, (0, 1, 3, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (ROWS, DIM))
    return x * DIM**-0.5
