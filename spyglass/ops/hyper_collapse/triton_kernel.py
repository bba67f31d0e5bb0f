"""The kernel behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spyglass.ops.gpu import overlap
from spyglass.ops.overlap import begin

_WIDTH = 512


def collapse(streams_TMC: torch.Tensor, pre_TM: torch.Tensor, out_TC: torch.Tensor) -> None:
    """Write hyper_collapse into `out_TC`; all contiguous."""
    rows, streams, width = streams_TMC.shape
    if out_TC.numel():
        _collapse[(rows, triton.cdiv(width, _WIDTH))](
            streams_TMC, pre_TM, out_TC, width,
            STREAMS=streams, WIDTH=_WIDTH, **overlap(out_TC),
        )  # fmt: skip


@triton.jit
def _collapse(
    streams_ptr, pre_ptr, out_ptr, width, STREAMS: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr
) -> None:
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = channel < width
    total = tl.zeros([WIDTH], tl.float32)
    for m in tl.static_range(STREAMS):
        stream = tl.load(streams_ptr + (row * STREAMS + m) * width + channel, mask=there, other=0.0)
        total += tl.load(pre_ptr + row * STREAMS + m) * stream.to(tl.float32)
    tl.store(out_ptr + row * width + channel, total.to(out_ptr.dtype.element_ty), mask=there)
