"""Routed experts: clamped SwiGLU with the routing weight applied before the down projection (spec v4 7.4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from spyglass.ops.linear_block.reference import linear_block
from spyglass.quant.formats import FakeQuant
from spyglass.quant.packed import Packed


@dataclass(frozen=True, slots=True)
class ExpertPair:
    """A low-rank pair beside one matrix of every expert: adds scale_er · (Σ_I a_erI x_I) · b_erO, fp32 all three.

    `dropout` is the share of the pair's inputs that is dropped.
    """

    a_ERI: torch.Tensor
    b_ERO: torch.Tensor
    scale_ER: torch.Tensor
    dropout: float = 0.0

    def addend(self, expert: int, x_NI: torch.Tensor) -> torch.Tensor:
        """What the pair adds for rows of one expert, fp32 [N, O]."""
        x_NI = torch.nn.functional.dropout(x_NI, self.dropout).float()
        return (x_NI @ self.a_ERI[expert].mT) * self.scale_ER[expert] @ self.b_ERO[expert]


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
    pairs: Mapping[str, ExpertPair] | None = None,
) -> torch.Tensor:
    """out_TC (fp32) = sum_k w2_e( w_k · silu(min(g, limit)) · clamp(u, ±limit) ),  g = w1_e(x), u = w3_e(x), e =
    ids_TK[t, k].

    `w1`, `w3` stacks [E, F, C], `w2` [E, C, F]; `ids_TK` int32 (-1 = row takes part in nothing), `weights_TK` fp32.
    g, u and each expert's output are rounded to x's dtype, the activation once before w2; the sum runs in fp32 in
    ascending expert order. `rounding` is applied to x and again to the activation (spec 7.5). `pairs` of an adapter, by
    matrix, see their inputs un-rounded and join before the one rounding (only `training` has them too).
    """
    pairs = {} if pairs is None else pairs

    def product(matrix: str, weight: Packed, x: torch.Tensor, expert: int) -> torch.Tensor:
        addend = pairs[matrix].addend(expert, x) if matrix in pairs else None
        return linear_block(x, weight[expert], rounding=rounding, addend_TO=addend)

    out_TC = torch.zeros(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    for expert in range(w1.shape[0]):
        token, choice = (ids_TK == expert).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        x = x_TC[token]
        gate = product("w1", w1, x, expert).float().clamp(max=limit)
        up = product("w3", w3, x, expert).float().clamp(-limit, limit)
        z = torch.nn.functional.silu(gate) * up * weights_TK[token, choice, None]
        y = product("w2", w2, z.to(x_TC.dtype), expert)
        out_TC = out_TC.index_add(0, token, y.float())
    return out_TC
