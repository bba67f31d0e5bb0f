"""Three sums and one pass per stream: `csrc/pointwise.cpp`."""

from __future__ import annotations

import torch

from spyglass.errors import DeviceError
from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels

__all__ = ["engram_gate", "usable"]


def engram_gate(
    streams_TMC: torch.Tensor,
    both_TE: torch.Tensor,
    q_weight_MC: torch.Tensor,
    k_weight_MC: torch.Tensor,
    *,
    eps: float,
    is_image_T: torch.Tensor | None = None,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """See `reference.py`.

    Raises:
        DeviceError: an input wants a gradient, or streams and memory are not of one dtype that has a kernel.
    """
    native.refuse_gradient("engram_gate", streams_TMC, both_TE, q_weight_MC, k_weight_MC)
    dtype = native.dtype_code("engram_gate", streams_TMC)
    if both_TE.dtype != streams_TMC.dtype:
        raise DeviceError(f"the CPU kernel of engram_gate takes keys and values in {streams_TMC.dtype}")
    streams_TMC, both_TE = streams_TMC.contiguous(), both_TE.contiguous()
    q_weight_MC, k_weight_MC = native.float32(q_weight_MC), native.float32(k_weight_MC)
    is_image_T = None if is_image_T is None else is_image_T.contiguous()
    out_TMC = torch.empty_like(streams_TMC)
    (kernels or native.best()).engram_gate(
        streams_TMC.data_ptr(), dtype, *streams_TMC.shape, both_TE.data_ptr(), q_weight_MC.data_ptr(),
        k_weight_MC.data_ptr(), native.address(is_image_T), eps, out_TMC.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out_TMC
