"""The same experts, differentiable, their matrices packed in every pass; rows are sorted by expert once."""

from __future__ import annotations

import torch

from spyglass.ops.linear_block.training import linear_block
from spyglass.quant.formats import FakeQuant
from spyglass.quant.packed import Packed


def experts_grouped(
    x_TC: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    w1: Packed,
    w3: Packed,
    w2: Packed,
    *,
    limit: float,
    rounding: FakeQuant | None = None,
) -> torch.Tensor:
    """See `reference.py`. The choice `ids_TK` has no gradient, the routing weights have one."""
    out_TC = torch.zeros(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    flat_N = ids_TK.flatten().long()
    counts = torch.bincount(flat_N + 1, minlength=w1.shape[0] + 1).tolist()
    places = flat_N.argsort(stable=True).split(counts)
    for expert, place in enumerate(places[1:]):
        if len(place) == 0:
            continue
        token = place // ids_TK.shape[1]
        x = x_TC[token]
        gate = linear_block(x, w1[expert], rounding=rounding).float().clamp(max=limit)
        up = linear_block(x, w3[expert], rounding=rounding).float().clamp(-limit, limit)
        z = torch.nn.functional.silu(gate) * up * weights_TK.flatten()[place, None]
        y = linear_block(z.to(x_TC.dtype), w2[expert], rounding=rounding)
        out_TC = out_TC.index_add(0, token, y.float())
    return out_TC
