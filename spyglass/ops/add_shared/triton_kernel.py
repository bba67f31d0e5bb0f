"""The kernel behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spyglass.ops.gpu import overlap
from spyglass.ops.overlap import begin

_FEW = 1 << 20  # values up to which programs are kept small


def add(routed_TC: torch.Tensor, shared_TC: torch.Tensor, out_TC: torch.Tensor) -> None:
    """Write the sum into `out_TC`; all contiguous."""
    count = out_TC.numel()
    if count:
        VALUES = 1024 if count <= _FEW else 4096
        _add[(triton.cdiv(count, VALUES),)](
            routed_TC, shared_TC, out_TC, count,
            VALUES=VALUES, **overlap(out_TC),
        )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _add(routed_ptr, shared_ptr, out_ptr, count, VALUES: tl.constexpr, OVERLAPS: tl.constexpr) -> None:
    begin(OVERLAPS)
    at = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    there = at < count
    routed = tl.load(routed_ptr + at, mask=there, other=0.0).to(tl.float32)
    shared = tl.load(shared_ptr + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (routed + shared).to(out_ptr.dtype.element_ty), mask=there)
