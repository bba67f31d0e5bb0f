"""The compiled kernels of its parts."""

from __future__ import annotations

from typing import Any

import torch

from spyglass.ops.add_shared.cpu import add_shared
from spyglass.ops.build import usable
from spyglass.ops.hyper_expand.cpu import hyper_expand
from spyglass.ops.hyper_read.cpu import hyper_read
from spyglass.ops.native import Kernels
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
    kernels: Kernels | None = None,
) -> tuple[torch.Tensor, ...]:
    """See `reference.py`. Raises DeviceError as its parts do."""
    if shared_TC is not None:
        z_TC = add_shared(z_TC, shared_TC, kernels=kernels)
    streams_TMC = hyper_expand(z_TC, streams_TMC, post_TM, comb_TMM, kernels=kernels)
    weights = fn_JE, scale_3, base_J, weight_C
    numbers: dict[str, Any] = {"norm_eps": norm_eps, "hc_eps": hc_eps, "rounds": rounds, "eps": eps}
    return streams_TMC, *hyper_read(streams_TMC, *weights, pre_TM=pre_TM, quant=quant, **numbers, kernels=kernels)
