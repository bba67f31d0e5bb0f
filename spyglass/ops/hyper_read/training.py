"""On a GPU the kernels that serve, with a backward of three launches; see `hyper_mix/triton_training.py`."""

from __future__ import annotations

from typing import Any

import torch

from spyglass.ops.hyper_read import reference, triton
from spyglass.ops.hyper_write_read.training import Frozen, read_gradient
from spyglass.quant.formats import FakeQuant


def hyper_read(
    streams_TMC: torch.Tensor,
    fn_JE: torch.Tensor,
    scale_3: torch.Tensor,
    base_J: torch.Tensor,
    weight_C: torch.Tensor,
    *,
    pre_TM: torch.Tensor | None = None,
    norm_eps: float,
    hc_eps: float,
    rounds: int,
    eps: float,
    quant: FakeQuant | None = None,
) -> tuple[torch.Tensor, ...]:
    """See `reference.py`, which also serves weights that are trained."""
    frozen = Frozen(fn_JE, scale_3, base_J, weight_C, norm_eps, hc_eps, rounds, eps)
    if quant is not None or not frozen.suits(streams_TMC):
        return reference.hyper_read(streams_TMC, *frozen.weights, pre_TM=pre_TM, quant=quant, **frozen.options)
    out: tuple[torch.Tensor, ...] = _Read.apply(streams_TMC.contiguous(), pre_TM, frozen)  # type: ignore[no-untyped-call]
    return out


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, streams_TMC: torch.Tensor, pre_TM: torch.Tensor | None, frozen: Frozen
    ) -> tuple[torch.Tensor, ...]:
        found = triton.hyper_read(streams_TMC, *frozen.weights, pre_TM=pre_TM, **frozen.options)
        ctx.save_for_backward(streams_TMC, pre_TM, found[1])
        ctx.frozen = frozen
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        from spyglass.ops.hyper_mix.triton_training import streams_gradient

        streams_TMC, given_TM, pre_TM = ctx.saved_tensors
        read, dgiven_TM = read_gradient(ctx.frozen, streams_TMC, pre_TM, given_TM, grads)
        return streams_gradient(streams_TMC, None, read, None)[0], dgiven_TM, None
