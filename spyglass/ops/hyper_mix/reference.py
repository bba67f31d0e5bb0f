"""Coefficients of one hyper-connection: how streams are read, written and mixed (spec v4 3.2)."""

from __future__ import annotations

import torch


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
    """pre_TM, post_TM, comb_TMM (source, target), all fp32; J = M (2 + M), E = M C.

    m = (x · fnᵀ) · rsqrt(mean x² + norm_eps);  pre = σ(m₀ s₀ + b₀) + hc_eps;  post = 2 σ(m₁ s₁ + b₁);
    comb = Sinkhorn(softmax_target(m₂ s₂ + b₂) + hc_eps): columns first, `rounds` column and `rounds` - 1 row
    normalisations, each dividing by its sum + hc_eps.
    """
    product_TJ = streams_TMC.flatten(1).float() @ fn_JE.float().mT
    return coefficients(product_TJ, streams_TMC, scale_3, base_J, norm_eps=norm_eps, hc_eps=hc_eps, rounds=rounds)


def coefficients(
    product_TJ: torch.Tensor,
    streams_TMC: torch.Tensor,
    scale_3: torch.Tensor,
    base_J: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    rounds: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `hyper_mix` makes of its product x · fnᵀ (fp32 [T, J])."""
    streams = streams_TMC.shape[1]
    x_TE = streams_TMC.flatten(1).float()
    m_TJ = product_TJ * torch.rsqrt(x_TE.square().mean(dim=-1, keepdim=True) + norm_eps)
    pre, post, comb = m_TJ.split([streams, streams, streams * streams], dim=-1)
    base_pre, base_post, base_comb = base_J.float().split([streams, streams, streams * streams])
    pre_TM = torch.sigmoid(pre * scale_3[0] + base_pre) + hc_eps
    post_TM = 2 * torch.sigmoid(post * scale_3[1] + base_post)
    comb_TMM = (comb * scale_3[2] + base_comb).unflatten(-1, (streams, streams)).softmax(dim=-1) + hc_eps
    comb_TMM = comb_TMM / (comb_TMM.sum(dim=1, keepdim=True) + hc_eps)
    for _ in range(rounds - 1):
        comb_TMM = comb_TMM / (comb_TMM.sum(dim=2, keepdim=True) + hc_eps)
        comb_TMM = comb_TMM / (comb_TMM.sum(dim=1, keepdim=True) + hc_eps)
    return pre_TM, post_TM, comb_TMM
