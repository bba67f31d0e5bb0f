"""As `hyper_mix`: products shared out over the channels, then their sums."""

from __future__ import annotations

import torch

from spyglass.ops.gpu import learns, usable
from spyglass.ops.hyper_head import reference

__all__ = ["hyper_head", "usable"]


def hyper_head(
    streams_TMC: torch.Tensor,
    fn_ME: torch.Tensor,
    scale_1: torch.Tensor,
    base_M: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """See `reference.py`, which also serves gradients and float64."""
    if learns(streams_TMC, fn_ME, scale_1, base_M) or streams_TMC.dtype == torch.float64:
        return reference.hyper_head(streams_TMC, fn_ME, scale_1, base_M, norm_eps=norm_eps, hc_eps=hc_eps)
    from spyglass.ops.hyper_head.triton_kernel import finish_head
    from spyglass.ops.hyper_mix.triton_kernel import project

    sums = project(streams_TMC.contiguous(), fn_ME.contiguous())
    return finish_head(sums, streams_TMC, scale_1, base_M, norm_eps, hc_eps)
