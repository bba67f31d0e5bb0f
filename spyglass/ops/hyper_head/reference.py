"""How the last collapse weighs the residual streams (spec v4 3.3)."""

from __future__ import annotations

import torch


def hyper_head(
    streams_TMC: torch.Tensor,
    fn_ME: torch.Tensor,
    scale_1: torch.Tensor,
    base_M: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """p_TM = σ(m · scale + base) + hc_eps, m = (x fnᵀ) · rsqrt(mean x² + norm_eps), x the joined streams; fp32."""
    x_TE = streams_TMC.flatten(1).float()
    m_TM = (x_TE @ fn_ME.mT) * torch.rsqrt(x_TE.square().mean(dim=-1, keepdim=True) + norm_eps)
    return torch.sigmoid(m_TM * scale_1 + base_M) + hc_eps
