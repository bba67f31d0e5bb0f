"""One launch, one read of streams and sub-layer, one write."""

from __future__ import annotations

import torch

from spyglass.ops.gpu import learns, usable
from spyglass.ops.hyper_expand import reference

__all__ = ["hyper_expand", "usable"]


def hyper_expand(
    z_TC: torch.Tensor, streams_TMC: torch.Tensor, post_TM: torch.Tensor, comb_TMM: torch.Tensor
) -> torch.Tensor:
    """See `reference.py`, which also serves gradients and float64."""
    if learns(z_TC, streams_TMC, post_TM, comb_TMM) or streams_TMC.dtype == torch.float64:
        return reference.hyper_expand(z_TC, streams_TMC, post_TM, comb_TMM)
    from spyglass.ops.hyper_expand.triton_kernel import expand

    streams_TMC = streams_TMC.contiguous()
    out_TMC = torch.empty_like(streams_TMC)
    expand(z_TC.contiguous(), streams_TMC, post_TM.contiguous(), comb_TMM.contiguous(), out_TMC)
    return out_TMC
