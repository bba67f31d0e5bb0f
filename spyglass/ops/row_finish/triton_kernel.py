"""The kernel behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spyglass.ops import tuned
from spyglass.ops.fake_quant.triton_kernel import round_block, rounding, to_bf16
from spyglass.ops.gpu import overlap
from spyglass.ops.hadamard.triton_kernel import rotate_rows
from spyglass.ops.overlap import begin
from spyglass.ops.rms_norm.triton_kernel import inverse_size
from spyglass.ops.rope_partial.triton_kernel import turn_pairs
from spyglass.ops.row_finish.triton import shape_key
from spyglass.ops.stored_kernel import write_codes
from spyglass.ops.tuned import RowWise
from spyglass.quant.formats import FakeQuant

_VALUES = 2048  # of a program, where a row is not longer


def finish(
    x_THD: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    out_THD: torch.Tensor,
    *,
    weight_D: torch.Tensor | None,
    eps: float | None,
    stepwise: bool,
    hadamard: bool,
    quant: FakeQuant | None,
    dims: int,
    tail_bf16: bool,
    pages_ND: torch.Tensor | None,
    write_T: torch.Tensor | None,
    row: int,
    launch: RowWise | None,
) -> None:
    """Write row_finish of x (channels contiguous) into `out_THD` (contiguous), and into rows of `pages_ND`.

    `row`: how those are stored (`stored.row_code`); codes are made of the rows in `out_THD`, which stay as they are.
    """
    rows, heads, dim = x_THD.shape
    if out_THD.numel() == 0:
        return
    if launch is None:
        launch = tuned.find("row_finish", (RowWise,), rows, **shape_key(x_THD, hadamard, quant))
    if launch is None:
        at_once = min(max(_VALUES // dim, 1), triton.next_power_of_2(heads))
        launch = RowWise(at_once=at_once, warps=4 if at_once * dim > 512 else 2)
    HEADS = launch.at_once
    writes = pages_ND is not None and write_T is not None
    _finish_rows[(rows, triton.cdiv(heads, HEADS))](
        x_THD, cos_TR, sin_TR, out_THD, cos_TR if weight_D is None else weight_D, pages_ND if writes else out_THD,
        write_T if writes else cos_TR, x_THD.stride(0), x_THD.stride(1), heads, 0.0 if eps is None else eps, dims,
        NORMS=eps is not None, WEIGHTED=weight_D is not None, STEPWISE=stepwise, HADAMARD=hadamard,
        ROUNDS=quant is not None and not row, TAIL_BF16=tail_bf16, WRITES=writes, ROW=row, HEADS=HEADS, DIM=dim,
        LOG_DIM=dim.bit_length() - 1, PAIRS=cos_TR.shape[1], num_warps=launch.warps, enable_fp_fusion=False,
        **rounding(quant, dim), **overlap(x_THD),
    )  # fmt: skip


@triton.jit
def _finish_rows(
    x_ptr, cos_ptr, sin_ptr, out_ptr, weight_ptr, pages_ptr, write_ptr, row_stride, head_stride, heads, eps, dims,
    NORMS: tl.constexpr, WEIGHTED: tl.constexpr, STEPWISE: tl.constexpr, HADAMARD: tl.constexpr, BLOCK: tl.constexpr,
    E4M3: tl.constexpr, E4M3_SCALE: tl.constexpr, ROUNDS: tl.constexpr, TAIL_BF16: tl.constexpr, WRITES: tl.constexpr,
    ROW: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, LOG_DIM: tl.constexpr, PAIRS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    begin(OVERLAPS)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, DIM)[None, :]
    there = head < heads
    x = tl.load(x_ptr + row * row_stride + head * head_stride + channel, mask=there, other=0.0).to(tl.float32)
    if NORMS:
        x = x * inverse_size(x, DIM, eps, STEPWISE, DTYPE)[:, None]
        if WEIGHTED:
            x = tl.load(weight_ptr + channel).to(tl.float32) * x
        x = x.to(DTYPE).to(tl.float32)
    # the pairs before the last ones turn by nothing
    pair = tl.arange(0, DIM // 2)[None, :] - (DIM // 2 - PAIRS)
    cos = tl.load(cos_ptr + row * PAIRS + pair, mask=pair >= 0, other=1.0)
    sin = tl.load(sin_ptr + row * PAIRS + pair, mask=pair >= 0, other=0.0)
    turned = turn_pairs(x, cos, sin, HEADS, DIM // 2).to(DTYPE).to(tl.float32)
    x = tl.where(channel >= DIM - 2 * PAIRS, turned, x)
    if HADAMARD:
        x = rotate_rows(x, HEADS, DIM, LOG_DIM).to(DTYPE).to(tl.float32)
    if ROUNDS:
        blocks = tl.reshape(x, (HEADS, DIM // BLOCK, BLOCK))
        amax = tl.max(tl.abs(blocks), axis=2)[:, :, None]
        rounded = tl.reshape(round_block(blocks, amax, E4M3, E4M3_SCALE), (HEADS, DIM))
        x = tl.where(channel < dims, rounded, to_bf16(x) if TAIL_BF16 else x)
    out = x.to(DTYPE)
    tl.store(out_ptr + (row * heads + head) * DIM + channel, out, mask=there)
    if ROW > 0:
        one = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        to = tl.load(write_ptr + row + 0 * one).to(tl.int64)
        write_codes(x, pages_ptr, to, (to >= 0) & (one < heads), ROW, HEADS, DIM)
    elif WRITES:
        to = tl.load(write_ptr + row + 0 * head).to(tl.int64)
        tl.store(pages_ptr + to * DIM + channel, out.to(pages_ptr.dtype.element_ty), mask=there & (to >= 0))
