"""The gated unit of an expert (spec v4 7.4)."""

from __future__ import annotations

import torch


def swiglu(gate_TF: torch.Tensor, up_TF: torch.Tensor, *, limit: float) -> torch.Tensor:
    """out = silu(min(gate, limit)) · clamp(up, ±limit), fp32 inside, one rounding to the inputs' dtype."""
    gate, up = gate_TF.float().clamp(max=limit), up_TF.float().clamp(-limit, limit)
    return (torch.nn.functional.silu(gate) * up).to(gate_TF.dtype)
