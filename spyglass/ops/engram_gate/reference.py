"""The gate through which an n-gram memory enters the residual streams (spec v41 5.4)."""

from __future__ import annotations

import torch

_MIN = 1e-6


def engram_gate(
    streams_TMC: torch.Tensor,
    both_TE: torch.Tensor,
    q_weight_MC: torch.Tensor,
    k_weight_MC: torch.Tensor,
    *,
    eps: float,
    is_image_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """d_m = Σ_c h_mc q_mc k_mc key_mc · rsqrt(mean h_m² + eps) · rsqrt(mean key_m² + eps) · C^-1/2,
    g_m = σ(sign(d_m) sqrt(max(|d_m|, 1e-6))), 0 on images (`is_image_T` bool),  out_m = h_m + g_m · value.

    A row of `both_TE` holds the M keys and then the value, [(M + 1) C]. fp32 inside, statistics per stream, one
    rounding to the dtype of the streams h.
    """
    streams, hidden = streams_TMC.shape[1:]
    key_TMC, value_TC = both_TE.float().split([streams * hidden, hidden], dim=-1)
    key_TMC, h_TMC = key_TMC.unflatten(-1, (streams, hidden)), streams_TMC.float()
    dot_TM = (h_TMC * (q_weight_MC * k_weight_MC) * key_TMC).sum(dim=-1)
    for x_TMC in (h_TMC, key_TMC):
        dot_TM = dot_TM * torch.rsqrt(x_TMC.square().mean(dim=-1) + eps)
    dot_TM = dot_TM * hidden**-0.5
    gate_TM = torch.sigmoid(torch.copysign(dot_TM.abs().clamp(min=_MIN).sqrt(), dot_TM))
    if is_image_T is not None:
        gate_TM = gate_TM.masked_fill(is_image_T[:, None], 0.0)
    return (h_TMC + gate_TM[:, :, None] * value_TC[:, None]).to(streams_TMC.dtype)
