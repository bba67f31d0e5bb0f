"""The kernel behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spyglass.ops import tuned
from spyglass.ops.fake_quant.triton_kernel import round_blocks, rounding
from spyglass.ops.gpu import overlap
from spyglass.ops.overlap import begin
from spyglass.ops.tuned import RowWise
from spyglass.quant.formats import FakeQuant

_WIDTH = 512


def gate(
    gate_TF: torch.Tensor,
    up_TF: torch.Tensor,
    out_TF: torch.Tensor,
    limit: float,
    quant: FakeQuant | None,
    launch: RowWise | None,
) -> None:
    """Write swiglu into `out_TF` (contiguous); channels of the inputs contiguous."""
    rows, width = out_TF.shape
    if out_TF.numel() == 0:
        return
    if launch is None:
        launch = tuned.find("swiglu", (RowWise,), rows, width=width)
    if launch is None:
        launch = RowWise(at_once=_WIDTH, warps=4)
    _swiglu[(rows, triton.cdiv(width, launch.at_once))](
        gate_TF, up_TF, out_TF, gate_TF.stride(0), up_TF.stride(0), width, limit,
        **rounding(quant), WIDTH=launch.at_once, num_warps=launch.warps, enable_fp_fusion=False, **overlap(gate_TF),
    )  # fmt: skip


@triton.jit
def _swiglu(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, width, limit,
    BLOCK: tl.constexpr, E4M3: tl.constexpr, E4M3_SCALE: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = channel < width
    gate = tl.load(gate_ptr + row * gate_stride + channel, mask=there, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + channel, mask=there, other=0.0).to(tl.float32)
    out = clamped_unit(gate, up, limit)
    if BLOCK > 0:
        out = out.to(out_ptr.dtype.element_ty).to(tl.float32)
        out = tl.reshape(round_blocks(tl.reshape(out, (WIDTH // BLOCK, BLOCK)), E4M3, E4M3_SCALE), (WIDTH,))
    tl.store(out_ptr + row * width + channel, out.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def clamped_unit(gate, up, limit) -> tl.tensor:
    """silu(min(gate, limit)) · clamp(up, ±limit), all fp32."""
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL), -limit, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1 + tl.exp(-gate)) * up
