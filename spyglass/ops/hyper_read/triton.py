"""Two launches: the products, then everything else."""

from __future__ import annotations

from typing import Any

import torch

from spyglass.ops.gpu import learns, usable
from spyglass.ops.hyper_read import reference
from spyglass.quant.formats import FakeQuant

__all__ = ["WIDEST", "hyper_read", "usable"]
WIDEST = 1 << 13  # channels of a stream, held in registers


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
    """See `reference.py`, which also serves gradients, float64 and very wide streams."""
    given = streams_TMC, fn_JE, scale_3, base_J, weight_C
    numbers: dict[str, Any] = {"norm_eps": norm_eps, "hc_eps": hc_eps, "rounds": rounds}
    if not suits(streams_TMC, quant) or learns(*given, pre_TM):
        return reference.hyper_read(*given, pre_TM=pre_TM, eps=eps, quant=quant, **numbers)
    from spyglass.ops.hyper_mix.triton_kernel import Read, finish, project

    streams_TMC = streams_TMC.contiguous()
    x_TC = streams_TMC.new_empty((streams_TMC.shape[0], streams_TMC.shape[2]))
    sums = project(streams_TMC, fn_JE.contiguous())
    read = Read(
        x_TC=x_TC,
        weight_C=weight_C,
        eps=eps,
        pre_TM=None if pre_TM is None else pre_TM.contiguous(),
        quant=quant,
        rounded_TC=None if quant is None else torch.empty_like(x_TC),
    )
    found = finish(sums, streams_TMC, scale_3, base_J, read=read, **numbers)
    return (x_TC, *found, *(() if read.rounded_TC is None else (read.rounded_TC,)))


def suits(streams_TMC: torch.Tensor, quant: FakeQuant | None) -> bool:
    """Whether the kernels take these streams and this rounding of what is read."""
    width = streams_TMC.shape[2]
    whole = quant is None or (quant.block & (quant.block - 1) == 0 and quant.block <= width)
    return whole and width <= WIDEST and streams_TMC.dtype != torch.float64
