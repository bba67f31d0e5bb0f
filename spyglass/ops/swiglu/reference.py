"""The gated unit of an expert (spec v4 7.4)."""

from __future__ import annotations

import torch

from spyglass.ops.fake_quant.reference import fake_quant
from spyglass.quant.formats import FakeQuant


def swiglu(gate_TF: torch.Tensor, up_TF: torch.Tensor, *, limit: float, quant: FakeQuant | None = None) -> torch.Tensor:
    """out = silu(min(gate, limit)) · clamp(up, ±limit), one rounding to the inputs' dtype; then `quant`."""
    gate, up = gate_TF.float().clamp(max=limit), up_TF.float().clamp(-limit, limit)
    out_TF = (torch.nn.functional.silu(gate) * up).to(gate_TF.dtype)
    return out_TF if quant is None else fake_quant(out_TF, quant)
