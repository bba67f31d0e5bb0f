"""One launch, each row and stream by a program of its own."""

from __future__ import annotations

import torch

from spyglass.ops.engram_gate import reference
from spyglass.ops.gpu import learns, usable

__all__ = ["engram_gate", "usable"]
_WIDEST = 1 << 13  # channels of a stream, held in registers


def engram_gate(
    streams_TMC: torch.Tensor,
    both_TE: torch.Tensor,
    q_weight_MC: torch.Tensor,
    k_weight_MC: torch.Tensor,
    *,
    eps: float,
    is_image_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.py`, which also serves gradients, float64 and very wide streams."""
    wide = streams_TMC.shape[2] > _WIDEST or streams_TMC.dtype == torch.float64
    if wide or learns(streams_TMC, both_TE, q_weight_MC, k_weight_MC):
        return reference.engram_gate(streams_TMC, both_TE, q_weight_MC, k_weight_MC, eps=eps, is_image_T=is_image_T)
    from spyglass.ops.engram_gate.triton_kernel import gate

    streams_TMC = streams_TMC.contiguous()
    out_TMC = torch.empty_like(streams_TMC)
    gate(
        streams_TMC, both_TE.contiguous(), q_weight_MC.contiguous(), k_weight_MC.contiguous(), out_TMC, eps, is_image_T
    )
    return out_TMC
