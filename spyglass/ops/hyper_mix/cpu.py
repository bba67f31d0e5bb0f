"""Projection, norm and Sinkhorn rounds in one call: `csrc/pointwise.cpp`."""

from __future__ import annotations

import torch

from spyglass.errors import DeviceError
from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels

__all__ = ["hyper_mix", "usable"]


def hyper_mix(
    streams_TMC: torch.Tensor,
    fn_JE: torch.Tensor,
    scale_3: torch.Tensor,
    base_J: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    rounds: int,
    kernels: Kernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference.py`.

    Raises:
        DeviceError: an input wants a gradient, a dtype has no kernel, or there are more than eight streams.
    """
    native.refuse_gradient("hyper_mix", streams_TMC, fn_JE, scale_3, base_J)
    dtype = native.dtype_code("hyper_mix", streams_TMC)
    rows, streams, width = streams_TMC.shape
    if streams > 8:
        raise DeviceError(f"the CPU kernel of hyper_mix takes up to 8 streams, not {streams}; use ops='reference'")
    streams_TMC = streams_TMC.contiguous()
    fn_JE, scale_3, base_J = native.float32(fn_JE), native.float32(scale_3), native.float32(base_J)
    pre_TM = torch.empty((rows, streams))
    post_TM = torch.empty((rows, streams))
    comb_TMM = torch.empty((rows, streams, streams))
    (kernels or native.best()).hyper_mix(
        streams_TMC.data_ptr(), dtype, rows, streams, width, fn_JE.data_ptr(), scale_3.data_ptr(), base_J.data_ptr(),
        norm_eps, hc_eps, rounds, pre_TM.data_ptr(), post_TM.data_ptr(), comb_TMM.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return pre_TM, post_TM, comb_TMM
