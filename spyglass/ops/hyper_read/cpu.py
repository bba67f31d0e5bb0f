"""The compiled kernels of its parts."""

from __future__ import annotations

from typing import Any

import torch

from spyglass.ops.build import usable
from spyglass.ops.fake_quant.cpu import fake_quant
from spyglass.ops.hyper_collapse.cpu import hyper_collapse
from spyglass.ops.hyper_mix.cpu import hyper_mix
from spyglass.ops.native import Kernels
from spyglass.ops.rms_norm.cpu import rms_norm
from spyglass.quant.formats import FakeQuant

__all__ = ["hyper_read", "usable"]


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
    kernels: Kernels | None = None,
) -> tuple[torch.Tensor, ...]:
    """See `reference.py`. Raises DeviceError as its parts do."""
    numbers: dict[str, Any] = {"norm_eps": norm_eps, "hc_eps": hc_eps, "rounds": rounds}
    pre, post, comb = hyper_mix(streams_TMC, fn_JE, scale_3, base_J, **numbers, kernels=kernels)
    x_TC = hyper_collapse(streams_TMC, pre if pre_TM is None else pre_TM, kernels=kernels)
    x_TC = rms_norm(x_TC, weight_C, eps=eps, kernels=kernels)
    return (x_TC, pre, post, comb, *(() if quant is None else (fake_quant(x_TC, quant, kernels=kernels),)))
