"""One launch, one read and one write, where the reference makes seven passes."""

from __future__ import annotations

import torch

from spyglass.ops import tuned
from spyglass.ops.gpu import learns, usable
from spyglass.ops.rms_norm import reference
from spyglass.quant.formats import FakeQuant

__all__ = ["rms_norm", "shape_key", "usable"]
_WIDEST = 1 << 14  # a row is held in registers


def rms_norm(
    x_ND: torch.Tensor,
    weight_D: torch.Tensor | None,
    *,
    eps: float,
    stepwise: bool = False,
    quant: FakeQuant | None = None,
    launch: tuned.RowWise | None = None,
) -> torch.Tensor:
    """See `reference.py`, which also serves gradients, float64 and very wide rows."""
    if not _suits(x_ND, quant) or learns(x_ND, weight_D):
        return reference.rms_norm(x_ND, weight_D, eps=eps, stepwise=stepwise, quant=quant)
    from spyglass.ops.rms_norm.triton_kernel import normalise

    assert weight_D is None or not stepwise
    rows_ND = x_ND.reshape(-1, x_ND.shape[-1])
    out_ND = torch.empty(rows_ND.shape, dtype=x_ND.dtype, device=x_ND.device)
    normalise(rows_ND, None if weight_D is None else weight_D.contiguous(), out_ND, eps, stepwise, quant, launch)
    return out_ND.view(x_ND.shape)


def shape_key(x_ND: torch.Tensor, quant: FakeQuant | None) -> dict[str, object]:
    """What a table knows the op by."""
    return {"dim": x_ND.shape[-1], "round": 0 if quant is None else quant.block}


def _suits(x_ND: torch.Tensor, quant: FakeQuant | None) -> bool:
    dim = x_ND.shape[-1]
    blocks = quant is None or (quant.block & (quant.block - 1) == 0 and quant.block <= dim)
    return blocks and x_ND.stride(-1) == 1 and x_ND.dtype != torch.float64 and 0 < dim <= _WIDEST


def suits(x_ND: torch.Tensor) -> bool:
    """Whether the kernel takes these rows."""
    return _suits(x_ND, None)
