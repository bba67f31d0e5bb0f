"""The kernel behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spyglass.ops import tuned
from spyglass.ops.fake_quant.triton_kernel import round_blocks, rounding
from spyglass.ops.gpu import overlap
from spyglass.ops.overlap import begin
from spyglass.ops.rms_norm.triton import shape_key
from spyglass.ops.tuned import RowWise
from spyglass.quant.formats import FakeQuant

_VALUES = 2048  # of a program, where a row is not longer


def normalise(
    x_ND: torch.Tensor,
    weight_D: torch.Tensor | None,
    out_ND: torch.Tensor,
    eps: float,
    stepwise: bool,
    quant: FakeQuant | None,
    launch: RowWise | None,
) -> None:
    """Write rms_norm of the rows of x (channels contiguous) into `out_ND` (contiguous)."""
    rows, dim = x_ND.shape
    if rows == 0:
        return
    DIM = triton.next_power_of_2(dim)
    if launch is None:
        launch = tuned.find("rms_norm", (RowWise,), rows, **shape_key(x_ND, quant))
    if launch is None:
        launch = RowWise(at_once=max(_VALUES // DIM, 1), warps=4 if DIM <= 4096 else 8)
    ROWS = launch.at_once
    _normalise_rows[(triton.cdiv(rows, ROWS),)](
        x_ND, x_ND if weight_D is None else weight_D, out_ND, rows, x_ND.stride(0), dim, eps,
        WEIGHTED=weight_D is not None, STEPWISE=stepwise, **rounding(quant), ROWS=ROWS, DIM=DIM, num_warps=launch.warps,
        enable_fp_fusion=False, **overlap(x_ND),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _normalise_rows(
    x_ptr, weight_ptr, out_ptr, rows, row_stride, dim, eps,
    WEIGHTED: tl.constexpr, STEPWISE: tl.constexpr, BLOCK: tl.constexpr, E4M3: tl.constexpr, E4M3_SCALE: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    begin(OVERLAPS)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    channel = tl.arange(0, DIM)[None, :]
    there = (row < rows) & (channel < dim)
    x = tl.load(x_ptr + row * row_stride + channel, mask=there, other=0.0).to(tl.float32)
    x = x * inverse_size(x, dim, eps, STEPWISE, out_ptr.dtype.element_ty)[:, None]
    if WEIGHTED:
        x = tl.load(weight_ptr + channel, mask=channel < dim, other=0.0).to(tl.float32) * x
    if BLOCK > 0:
        x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
        x = tl.reshape(round_blocks(tl.reshape(x, (ROWS * DIM // BLOCK, BLOCK)), E4M3, E4M3_SCALE), (ROWS, DIM))
    tl.store(out_ptr + row * dim + channel, x.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def inverse_size(x, dim, eps, STEPWISE: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """rsqrt(mean x² + eps) of each row of x [R, D] fp32, zeros behind `dim`; `STEPWISE` rounds each step to DTYPE."""
    if STEPWISE:
        mean = (tl.sum((x * x).to(DTYPE).to(tl.float32), axis=1) / dim).to(DTYPE).to(tl.float32)
        return tl.rsqrt((mean + eps).to(DTYPE).to(tl.float32)).to(DTYPE).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) / dim + eps)
