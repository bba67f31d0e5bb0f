"""Routed experts: clamped SwiGLU with the routing weight applied before the down projection (spec v4 7.4)."""

from __future__ import annotations

import torch

from spyglass.ops.experts_grouped.adapters import Addends, ExpertAdapters
from spyglass.ops.linear_block.reference import linear_block
from spyglass.quant.formats import FakeQuant
from spyglass.quant.packed import Packed

CAPABILITIES: frozenset[str] = frozenset()  # it asks the host which rows belong together


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
    adapter_T: torch.Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """out_TC (fp32) = sum_k w2_e( w_k · silu(min(g, limit)) · clamp(u, ±limit) ),  g = w1_e(x), u = w3_e(x), e =
    ids_TK[t, k].

    `w1`, `w3` stacks [E, F, C], `w2` [E, C, F]; `ids_TK` int32 (-1 = row takes part in nothing), `weights_TK` fp32.
    g, u and each expert's output are rounded to x's dtype, the activation once before w2; the sum runs in fp32 in
    ascending expert order. `rounding` is applied to x and again to the activation (spec 7.5). `adapters` see
    their inputs un-rounded and join before the one rounding, for the rows whose `adapter_T` (int32) is one of theirs.
    """
    addends = None if adapters is None or adapter_T is None else Addends(adapters)

    def product(matrix: str, weight: Packed, x: torch.Tensor, expert: int, token: torch.Tensor) -> torch.Tensor:
        added = None if addends is None or adapter_T is None else addends(matrix, expert, x, adapter_T[token])
        return linear_block(x, weight[expert], rounding=rounding, addend_TO=added)

    out_TC = torch.zeros(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    for expert in range(w1.shape[0]):
        token, choice = (ids_TK == expert).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        x = x_TC[token]
        gate = product("w1", w1, x, expert, token).float().clamp(max=limit)
        up = product("w3", w3, x, expert, token).float().clamp(-limit, limit)
        z = torch.nn.functional.silu(gate) * up * weights_TK[token, choice, None]
        y = product("w2", w2, z.to(x_TC.dtype), expert, token)
        out_TC = out_TC.index_add(0, token, y.float())
    return out_TC
