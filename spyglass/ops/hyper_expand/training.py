"""On a GPU one launch for each direction; see `hyper_mix/triton_training.py`."""

from __future__ import annotations

from typing import Any

import torch

from spyglass.ops import gpu
from spyglass.ops.hyper_expand import reference, triton


def hyper_expand(
    z_TC: torch.Tensor, streams_TMC: torch.Tensor, post_TM: torch.Tensor, comb_TMM: torch.Tensor
) -> torch.Tensor:
    """See `reference.py`, which also serves fp64."""
    streams = streams_TMC.shape[1]
    if not gpu.trains(z_TC, streams_TMC) or streams & (streams - 1):
        return reference.hyper_expand(z_TC, streams_TMC, post_TM, comb_TMM)
    out_TMC: torch.Tensor = _Expand.apply(z_TC, streams_TMC, post_TM, comb_TMM)  # type: ignore[no-untyped-call]
    return out_TMC


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z_TC: torch.Tensor, streams_TMC: torch.Tensor, post_TM: torch.Tensor, comb_TMM: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(z_TC, streams_TMC, post_TM, comb_TMM)
        return triton.hyper_expand(z_TC, streams_TMC, post_TM, comb_TMM)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from spyglass.ops.hyper_mix.triton_training import Written, streams_gradient

        z_TC, streams_TMC, post_TM, comb_TMM = (one.contiguous() for one in ctx.saved_tensors)
        written = Written(z_TC=z_TC, shared_TC=None, streams_TMC=streams_TMC, post_TM=post_TM, comb_TMM=comb_TMM)
        dz_TC, *others = streams_gradient(streams_TMC, grads[0].contiguous(), None, written)
        return dz_TC.to(z_TC.dtype), *others
