"""One pass: `csrc/pointwise.cpp`."""

from __future__ import annotations

import torch

from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels

__all__ = ["compress_rows", "usable"]


def compress_rows(
    kv_TE: torch.Tensor,
    gate_TE: torch.Tensor,
    ape_BE: torch.Tensor | None,
    phase_T: torch.Tensor,
    *,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """See `reference.py`. Raises DeviceError for an input that wants a gradient."""
    native.refuse_gradient("compress_rows", kv_TE, gate_TE, ape_BE)
    kv_TE, gate_TE = native.float32(kv_TE), native.float32(gate_TE)
    ape_BE = None if ape_BE is None else native.float32(ape_BE)
    phase_T = phase_T.to(torch.int64).contiguous()
    rows, width = kv_TE.shape
    out_TE = torch.empty((rows, 2 * width))
    (kernels or native.best()).compress_rows(
        kv_TE.data_ptr(), gate_TE.data_ptr(), native.address(ape_BE), phase_T.data_ptr(), rows, width,
        out_TE.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out_TE
