"""Two launches: products shared out over the channels, then everything that a row makes of their sums."""

from __future__ import annotations

import torch

from spyglass.ops.gpu import learns, usable
from spyglass.ops.hyper_mix import reference

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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference.py`, which also serves gradients and float64."""
    if learns(streams_TMC, fn_JE, scale_3, base_J) or streams_TMC.dtype == torch.float64:
        return reference.hyper_mix(streams_TMC, fn_JE, scale_3, base_J, norm_eps=norm_eps, hc_eps=hc_eps, rounds=rounds)
    from spyglass.ops.hyper_mix.triton_kernel import finish, project

    sums = project(streams_TMC.contiguous(), fn_JE.contiguous())
    return finish(sums, streams_TMC, scale_3, base_J, norm_eps=norm_eps, hc_eps=hc_eps, rounds=rounds)
