"""On a GPU one launch for each direction."""

from __future__ import annotations

from typing import Any

import torch

from spyglass.ops import gpu
from spyglass.ops.swiglu import reference, triton
from spyglass.quant.formats import FakeQuant


def swiglu(gate_TF: torch.Tensor, up_TF: torch.Tensor, *, limit: float, quant: FakeQuant | None = None) -> torch.Tensor:
    """See `reference.py`, which also serves fp64."""
    if quant is not None or gate_TF.dim() != 2 or not gpu.trains(gate_TF, up_TF):
        return reference.swiglu(gate_TF, up_TF, limit=limit, quant=quant)
    out_TF: torch.Tensor = _Unit.apply(gate_TF, up_TF, limit)  # type: ignore[no-untyped-call]
    return out_TF


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_TF: torch.Tensor, up_TF: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.save_for_backward(gate_TF, up_TF)
        ctx.limit = limit
        return triton.swiglu(gate_TF, up_TF, limit=limit)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        from spyglass.ops.experts_grouped.triton_training import gate_gradient

        gate_TF, up_TF = (part.contiguous() for part in ctx.saved_tensors)
        dgate_TF, dup_TF = torch.empty_like(gate_TF), torch.empty_like(up_TF)
        gate_gradient(gate_TF, up_TF, None, gate_TF, ctx.limit, grads[0].contiguous(), dgate_TF, dup_TF, None)
        return dgate_TF, dup_TF, None
