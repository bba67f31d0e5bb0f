"""The streams after a sub-layer (spec v4 3.2, step 7)."""

from __future__ import annotations

import torch


def hyper_expand(
    z_TC: torch.Tensor, streams_TMC: torch.Tensor, post_TM: torch.Tensor, comb_TMM: torch.Tensor
) -> torch.Tensor:
    """out_TLC = post_TL · z_TC + Σ_m comb_TML · streams_TMC: comb is (source, target). fp32 inside, one rounding."""
    mixed = torch.einsum("tml,tmc->tlc", comb_TMM, streams_TMC.float())
    return (post_TM[:, :, None] * z_TC.float()[:, None] + mixed).to(streams_TMC.dtype)
