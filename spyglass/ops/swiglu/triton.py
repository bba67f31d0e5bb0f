"""One launch over both halves, which may be columns of one product."""

from __future__ import annotations

import torch

from spyglass.ops import tuned
from spyglass.ops.gpu import learns, usable
from spyglass.ops.swiglu import reference
from spyglass.quant.formats import FakeQuant

__all__ = ["swiglu", "usable"]


def swiglu(
    gate_TF: torch.Tensor,
    up_TF: torch.Tensor,
    *,
    limit: float,
    quant: FakeQuant | None = None,
    launch: tuned.RowWise | None = None,
) -> torch.Tensor:
    """See `reference.py`, which also serves gradients, float64 and other than two dimensions."""
    if learns(gate_TF, up_TF) or gate_TF.dtype == torch.float64 or gate_TF.dim() != 2 or not _suits(quant):
        return reference.swiglu(gate_TF, up_TF, limit=limit, quant=quant)
    from spyglass.ops.swiglu.triton_kernel import gate

    if gate_TF.stride(1) != 1 or up_TF.stride(1) != 1:
        gate_TF, up_TF = gate_TF.contiguous(), up_TF.contiguous()
    out_TF = torch.empty(gate_TF.shape, dtype=gate_TF.dtype, device=gate_TF.device)
    gate(gate_TF, up_TF, out_TF, limit, quant, launch)
    return out_TF


def _suits(quant: FakeQuant | None) -> bool:
    return quant is None or (quant.block & (quant.block - 1) == 0 and quant.block <= 512)
