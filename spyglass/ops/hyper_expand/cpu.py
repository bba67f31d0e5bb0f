"""One pass over the streams: `csrc/pointwise.cpp`."""

from __future__ import annotations

import torch

from spyglass.errors import DeviceError
from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels

__all__ = ["hyper_expand", "usable"]


def hyper_expand(
    z_TC: torch.Tensor,
    streams_TMC: torch.Tensor,
    post_TM: torch.Tensor,
    comb_TMM: torch.Tensor,
    *,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """See `reference.py`.

    Raises:
        DeviceError: an input wants a gradient, a dtype has no kernel, or there are more than eight streams.
    """
    native.refuse_gradient("hyper_expand", z_TC, streams_TMC, post_TM, comb_TMM)
    dtype = native.dtype_code("hyper_expand", streams_TMC)
    rows, streams, width = streams_TMC.shape
    if streams > 8:
        raise DeviceError(f"the CPU kernel of hyper_expand takes up to 8 streams, not {streams}; use ops='reference'")
    z_TC, streams_TMC = z_TC.to(streams_TMC.dtype).contiguous(), streams_TMC.contiguous()
    post_TM, comb_TMM = native.float32(post_TM), native.float32(comb_TMM)
    out_TLC = torch.empty_like(streams_TMC)
    (kernels or native.best()).hyper_expand(
        z_TC.data_ptr(), streams_TMC.data_ptr(), dtype, rows, streams, width, post_TM.data_ptr(), comb_TMM.data_ptr(),
        out_TLC.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out_TLC
