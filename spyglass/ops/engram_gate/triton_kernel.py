"""The kernel behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spyglass.ops.gpu import overlap
from spyglass.ops.overlap import begin


def gate(
    streams_TMC: torch.Tensor,
    both_TE: torch.Tensor,
    q_weight_MC: torch.Tensor,
    k_weight_MC: torch.Tensor,
    out_TMC: torch.Tensor,
    eps: float,
    is_image_T: torch.Tensor | None,
) -> None:
    """Write engram_gate into `out_TMC`; all contiguous."""
    rows, streams, width = streams_TMC.shape
    if out_TMC.numel() == 0:
        return
    _gate[(rows, streams)](
        streams_TMC, both_TE, q_weight_MC, k_weight_MC, out_TMC, both_TE if is_image_T is None else is_image_T, width,
        width**-0.5, eps,
        IMAGES=is_image_T is not None, STREAMS=streams, WIDTH=triton.next_power_of_2(width),
        num_warps=8 if width > 2048 else 4, enable_fp_fusion=False, **overlap(out_TMC),
    )  # fmt: skip


@triton.jit
def _gate(
    streams_ptr, both_ptr, q_weight_ptr, k_weight_ptr, out_ptr, image_ptr, width, scale, eps,
    IMAGES: tl.constexpr, STREAMS: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    row, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, WIDTH)
    there = channel < width
    weight = tl.load(q_weight_ptr + stream * width + channel, mask=there, other=0.0)
    weight = weight * tl.load(k_weight_ptr + stream * width + channel, mask=there, other=0.0)
    begin(OVERLAPS)
    at = (row * STREAMS + stream) * width + channel
    h = tl.load(streams_ptr + at, mask=there, other=0.0).to(tl.float32)
    both = both_ptr + row * (STREAMS + 1) * width + channel
    key = tl.load(both + stream * width, mask=there, other=0.0).to(tl.float32)
    dot = tl.sum(h * weight * key, axis=0)
    dot = dot * tl.rsqrt(tl.sum(h * h, axis=0) / width + eps) * tl.rsqrt(tl.sum(key * key, axis=0) / width + eps)
    dot = dot * scale
    root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6, propagate_nan=tl.PropagateNan.ALL))
    share = 1 / (1 + tl.exp(tl.where(dot.to(tl.int32, bitcast=True) < 0, root, -root)))
    if IMAGES:
        share = tl.where(tl.load(image_ptr + row) != 0, 0.0, share)
    value = tl.load(both + STREAMS * width, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (h + share * value).to(out_ptr.dtype.element_ty), mask=there)
