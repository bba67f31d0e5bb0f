"""Two launches: the new streams and their products, then everything else."""

from __future__ import annotations

from typing import Any

import torch

from spyglass.ops.gpu import learns, usable
from spyglass.ops.hyper_read.triton import suits
from spyglass.ops.hyper_write_read import reference
from spyglass.quant.formats import FakeQuant

__all__ = ["hyper_write_read", "usable"]


def hyper_write_read(
    z_TC: torch.Tensor,
    shared_TC: torch.Tensor | None,
    streams_TMC: torch.Tensor,
    post_TM: torch.Tensor,
    comb_TMM: torch.Tensor,
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
    given = z_TC, shared_TC, streams_TMC, post_TM, comb_TMM, fn_JE, scale_3, base_J, weight_C
    numbers: dict[str, Any] = {"norm_eps": norm_eps, "hc_eps": hc_eps, "rounds": rounds}
    if not suits(streams_TMC, quant) or learns(*given, pre_TM):
        return reference.hyper_write_read(*given, pre_TM=pre_TM, eps=eps, quant=quant, **numbers)
    from spyglass.ops.hyper_mix.triton_kernel import Read, Write, finish, project

    write = Write(
        z_TC=z_TC.contiguous(),
        shared_TC=None if shared_TC is None else shared_TC.contiguous(),
        post_TM=post_TM.contiguous(),
        comb_TMM=comb_TMM.contiguous(),
        out_TMC=streams_TMC.new_empty(streams_TMC.shape),
    )
    sums = project(streams_TMC.contiguous(), fn_JE.contiguous(), write)
    read = Read(
        x_TC=streams_TMC.new_empty((streams_TMC.shape[0], streams_TMC.shape[2])),
        weight_C=weight_C,
        eps=eps,
        pre_TM=None if pre_TM is None else pre_TM.contiguous(),
        quant=quant,
        rounded_TC=None
        if quant is None
        else z_TC.new_empty((streams_TMC.shape[0], streams_TMC.shape[2]), dtype=streams_TMC.dtype),
    )
    found = finish(sums, write.out_TMC, scale_3, base_J, read=read, **numbers)
    return (write.out_TMC, read.x_TC, *found, *(() if read.rounded_TC is None else (read.rounded_TC,)))
