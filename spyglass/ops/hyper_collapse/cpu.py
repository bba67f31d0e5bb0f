"""One pass over the streams: `csrc/pointwise.cpp`."""

from __future__ import annotations

import torch

from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels

__all__ = ["hyper_collapse", "usable"]


def hyper_collapse(streams_TMC: torch.Tensor, pre_TM: torch.Tensor, *, kernels: Kernels | None = None) -> torch.Tensor:
    """See `reference.py`. Raises DeviceError for an input that wants a gradient or a dtype without kernel."""
    native.refuse_gradient("hyper_collapse", streams_TMC, pre_TM)
    dtype = native.dtype_code("hyper_collapse", streams_TMC)
    rows, streams, width = streams_TMC.shape
    streams_TMC, pre_TM = streams_TMC.contiguous(), native.float32(pre_TM)
    x_TC = torch.empty((rows, width), dtype=streams_TMC.dtype)
    (kernels or native.best()).hyper_collapse(
        streams_TMC.data_ptr(), dtype, rows, streams, width, pre_TM.data_ptr(), x_TC.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return x_TC
