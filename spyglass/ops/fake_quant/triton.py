"""One launch, one read and one write, for every element and kind of scale."""

from __future__ import annotations

import torch

from spyglass.ops.fake_quant import reference
from spyglass.ops.gpu import learns, usable
from spyglass.quant.formats import FakeQuant

__all__ = ["fake_quant", "usable"]


def fake_quant(
    x_ND: torch.Tensor, spec: FakeQuant, *, dims: int | None = None, tail_bf16: bool = False
) -> torch.Tensor:
    """See `reference.py`, which also serves gradients and float64."""
    if learns(x_ND) or x_ND.dtype == torch.float64:
        return reference.fake_quant(x_ND, spec, dims=dims, tail_bf16=tail_bf16)
    from spyglass.ops.fake_quant.triton_kernel import quantise_rows

    width = x_ND.shape[-1]
    rows_ND = x_ND.reshape(-1, width)
    if rows_ND.stride(-1) != 1:
        rows_ND = rows_ND.contiguous()
    out_ND = torch.empty(rows_ND.shape, dtype=x_ND.dtype, device=x_ND.device)
    quantise_rows(rows_ND, out_ND, spec, width if dims is None else dims, tail_bf16)
    return out_ND.view(x_ND.shape)
