"""The kernel behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from spyglass.ops.overlap import begin


@triton.jit
def put_together(
    kv_ptr, gate_ptr, kv_stride: tl.int32, gate_stride: tl.int32, ape_ptr, phase_ptr, out_ptr,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, CHANNELS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """A share of the channels of one row."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < WIDTH
    kv = tl.load(kv_ptr + row * kv_stride + channel, mask=there, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + channel, mask=there, other=0.0)
    if BIASED:
        phase = tl.load(phase_ptr + row)
        gate += tl.load(ape_ptr + phase * WIDTH + channel, mask=there, other=0.0)
    out_ptr += row * 2 * WIDTH + channel
    tl.store(out_ptr, kv, mask=there)
    tl.store(out_ptr + WIDTH, gate, mask=there)
