"""Routed experts of rows that have an adapter: the same sum, expert by expert, with a low-rank addend in every product.

The fused kernels know no adapters. Here each chosen expert is three products of its packed matrices, and what the
adapter adds joins each before its one rounding: to w1 and w3 from the layer's input, to w2 from the activation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from spyglass.ops.experts_grouped.reference import ExpertPair
from spyglass.quant.formats import FakeQuant
from spyglass.quant.packed import Packed

Matrix = Literal["w1", "w2", "w3"]
# (matrix, expert, x_NI, slot_N) -> addend fp32 [N, out], or None where no row has one
ExpertsDelta = Callable[[Matrix, int, torch.Tensor, torch.Tensor], torch.Tensor | None]


class ExpertsAdapter(Protocol):
    """What an adapter bank does for the routed experts of a layer."""

    def adapted(self, slot_T: torch.Tensor) -> torch.Tensor:
        """Bool [T]: rows whose slot holds something for these experts; never those of slot 0."""

    def deltas(self) -> ExpertsDelta:
        """The addends of one forward pass."""

    def pairs(self) -> Mapping[str, ExpertPair] | None:
        """The one adapter that there is, by matrix, if it has the same rank for every expert; else None."""


@dataclass(frozen=True, slots=True)
class ExpertStacks:
    """Stacks w1, w3 [E, F, C] and w2 [E, C, F], the clamp, the rounding of inputs, and the op `linear_block`."""

    stacks: Mapping[str, Packed]
    limit: float
    rounding: FakeQuant | None
    product: Callable[..., Any]


def adapted_experts(
    x_TC: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_T: torch.Tensor,
    experts: ExpertStacks,
    adapter: ExpertsAdapter,
) -> torch.Tensor:
    """out_TC (fp32) as `ops.experts_grouped` defines it, with adapter addends: g = w1 x + Δ1 x, u = w3 x + Δ3 x,
    y = w2 z + Δ2 z, z = weight · silu(min(g, limit)) · clamp(u, ±limit) rounded to x's dtype (spec v4 7.4).
    """
    limit, delta = experts.limit, adapter.deltas()
    out_TC = torch.zeros(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    for expert in ids_TK.unique().tolist():
        if expert < 0:
            continue
        token, choice = (ids_TK == expert).nonzero(as_tuple=True)
        x, slot = x_TC[token], slot_T[token]
        gate = _product(experts, delta, "w1", expert, x, slot).float().clamp(max=limit)
        up = _product(experts, delta, "w3", expert, x, slot).float().clamp(-limit, limit)
        z = torch.nn.functional.silu(gate) * up * weights_TK[token, choice, None]
        y = _product(experts, delta, "w2", expert, z.to(x_TC.dtype), slot)
        out_TC = out_TC.index_add(0, token, y.float())
    return out_TC


def _product(
    experts: ExpertStacks, delta: ExpertsDelta, matrix: Matrix, expert: int, x: torch.Tensor, slot: torch.Tensor
) -> torch.Tensor:
    out: torch.Tensor = experts.product(
        x, experts.stacks[matrix][expert], rounding=experts.rounding, addend_TO=delta(matrix, expert, x, slot)
    )
    return out
