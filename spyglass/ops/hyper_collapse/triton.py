"""One launch, one read of the streams."""

from __future__ import annotations

import torch

from spyglass.ops.gpu import learns, usable
from spyglass.ops.hyper_collapse import reference

__all__ = ["hyper_collapse", "usable"]


def hyper_collapse(streams_TMC: torch.Tensor, pre_TM: torch.Tensor) -> torch.Tensor:
    """See `reference.py`, which also serves gradients and float64."""
    if learns(streams_TMC, pre_TM) or streams_TMC.dtype == torch.float64:
        return reference.hyper_collapse(streams_TMC, pre_TM)
    from spyglass.ops.hyper_collapse.triton_kernel import collapse

    rows, _, width = streams_TMC.shape
    out_TC = torch.empty((rows, width), dtype=streams_TMC.dtype, device=streams_TMC.device)
    collapse(streams_TMC.contiguous(), pre_TM.contiguous(), out_TC)
    return out_TC
