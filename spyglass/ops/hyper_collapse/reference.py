"""The input of a sub-layer: a weighted sum of the residual streams (spec v4 3.2, step 6)."""

from __future__ import annotations

import torch


def hyper_collapse(streams_TMC: torch.Tensor, pre_TM: torch.Tensor) -> torch.Tensor:
    """x_TC = Σ_m pre_TM · streams_TMC, summed in fp32, one rounding to the streams' dtype."""
    return torch.einsum("tm,tmc->tc", pre_TM, streams_TMC.float()).to(streams_TMC.dtype)
