"""The kernel behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spyglass.ops.gpu import overlap
from spyglass.ops.overlap import begin

_WIDTH = 512


def expand(
    z_TC: torch.Tensor,
    streams_TMC: torch.Tensor,
    post_TM: torch.Tensor,
    comb_TMM: torch.Tensor,
    out_TMC: torch.Tensor,
    shared_TC: torch.Tensor | None = None,
) -> None:
    """Write hyper_expand into `out_TMC`; all contiguous. `shared_TC` is added to z first, as `add_shared` does it."""
    rows, streams, width = streams_TMC.shape
    if out_TMC.numel():
        _expand[(rows, triton.cdiv(width, _WIDTH))](
            z_TC, z_TC if shared_TC is None else shared_TC, streams_TMC, post_TM, comb_TMM, out_TMC, width,
            SHARED=shared_TC is not None, STREAMS=streams, WIDTH=_WIDTH, **overlap(z_TC),
        )  # fmt: skip


@triton.jit
def _expand(
    z_ptr, shared_ptr, streams_ptr, post_ptr, comb_ptr, out_ptr, width,
    SHARED: tl.constexpr, STREAMS: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = channel < width
    z = tl.load(z_ptr + row * width + channel, mask=there, other=0.0).to(tl.float32)
    if SHARED:
        z += tl.load(shared_ptr + row * width + channel, mask=there, other=0.0).to(tl.float32)
        z = z.to(out_ptr.dtype.element_ty).to(tl.float32)
    for target in tl.static_range(STREAMS):  # streams are read again from the nearest cache
        mixed = tl.zeros([WIDTH], tl.float32)
        for m in tl.static_range(STREAMS):
            stream = tl.load(streams_ptr + (row * STREAMS + m) * width + channel, mask=there, other=0.0)
            mixed += tl.load(comb_ptr + (row * STREAMS + m) * STREAMS + target) * stream.to(tl.float32)
        out = tl.load(post_ptr + row * STREAMS + target) * z + mixed
        to = out_ptr + (row * STREAMS + target) * width + channel
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=there)
