"""The kernel behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from spyglass.ops.overlap import begin


@triton.jit
def pool_channels(
    rows_ptr, state_ptr, sources_ptr, out_ptr,
    SOURCES: tl.constexpr, DIM: tl.constexpr, OVERLAP: tl.constexpr, AT_ONCE: tl.constexpr, CHANNELS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """A share of the channels of one entry: a softmax over its sources, a few of them at a time, channel by channel."""
    begin(OVERLAPS)
    entry = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    here = channel < DIM
    WIDTH: tl.constexpr = 2 * DIM if OVERLAP else DIM
    top = tl.full([CHANNELS], -1e30, tl.float32)
    total = tl.zeros([CHANNELS], tl.float32)
    mixed = tl.zeros([CHANNELS], tl.float32)
    for first in range(0, SOURCES, AT_ONCE):
        source = first + tl.arange(0, AT_ONCE)
        row = tl.load(sources_ptr + entry * SOURCES + source, mask=source < SOURCES, other=-1)
        start = tl.where(row >= 0, row, -(row + 2)).to(tl.int64) * (2 * WIDTH)
        if OVERLAP:  # the earlier half of the sources gives its first channels, the later half its last
            start += tl.where(source < SOURCES // 2, 0, DIM)
        at = start[:, None] + channel[None, :]
        new = (row >= 0)[:, None] & here[None, :]
        old = (row <= -2)[:, None] & here[None, :]
        gate = tl.load(rows_ptr + at + WIDTH, mask=new, other=float("-inf"))
        gate = tl.maximum(gate, tl.load(state_ptr + at + WIDTH, mask=old, other=float("-inf")))
        kv = tl.load(rows_ptr + at, mask=new, other=0.0) + tl.load(state_ptr + at, mask=old, other=0.0)
        higher = tl.maximum(top, tl.max(gate, 0))
        weight = tl.exp(gate - higher[None, :])
        kept = tl.exp(top - higher)
        total = total * kept + tl.sum(weight, 0)
        mixed = mixed * kept + tl.sum(weight * kv, 0)
        top = higher
    out = tl.where(total > 0, mixed / total, 0.0)
    tl.store(out_ptr + entry * DIM + channel, out.to(out_ptr.dtype.element_ty), mask=here)
