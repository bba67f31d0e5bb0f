"""The kernel behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spyglass.ops.gpu import overlap
from spyglass.ops.hyper_mix.triton_kernel import Sums, sigmoid
from spyglass.ops.overlap import begin


def finish_head(
    sums: Sums, streams_TMC: torch.Tensor, scale_1: torch.Tensor, base_M: torch.Tensor, norm_eps: float, hc_eps: float
) -> torch.Tensor:
    """σ(m · scale + base) + hc_eps from their sums, [T, M]."""
    _, splits, OUTPUTS = sums.products.shape
    rows, streams, width = streams_TMC.shape
    out_TM = torch.empty((rows, streams), dtype=torch.float32, device=sums.products.device)
    if rows:
        _finish_head[(rows,)](
            sums.products, sums.squares, scale_1, base_M, out_TM, width, splits, norm_eps, hc_eps,
            STREAMS=streams, OUTPUTS=OUTPUTS, SPLITS=triton.next_power_of_2(splits), num_warps=1,
            enable_fp_fusion=False, **overlap(sums.products),
        )  # fmt: skip
    return out_TM


@triton.jit
def _finish_head(
    products_ptr, squares_ptr, scale_ptr, base_ptr, out_ptr, width, splits, norm_eps, hc_eps,
    STREAMS: tl.constexpr, OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    there = split < splits
    squares = tl.load(squares_ptr + row * splits + split, mask=there, other=0.0)
    inverse = tl.rsqrt(tl.sum(squares, axis=0) / (width * STREAMS) + norm_eps)
    for m in tl.static_range(STREAMS):
        product = tl.load(products_ptr + (row * splits + split) * OUTPUTS + m, mask=there, other=0.0)
        value = sigmoid(tl.sum(product, axis=0) * inverse * tl.load(scale_ptr) + tl.load(base_ptr + m)) + hc_eps
        tl.store(out_ptr + row * STREAMS + m, value)
