"""Several un-pooled rows become one compressed row, by a softmax over the rows, channel by channel (spec v4 5.1)."""

from __future__ import annotations

import torch


def compress_pool(
    rows_TE: torch.Tensor,
    state_NE: torch.Tensor | None,
    sources_PB: torch.Tensor,
    *,
    overlap: bool,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """out_PD = Σ_b softmax_b(gate_PBD) · kv_PBD, fp32 inside, one rounding to `out_dtype`.

    A row of E = 2 · c · D fp32 holds kv (c · D) and then gate (c · D, positional bias already added). With `overlap`
    c = 2: the first half of the B sources (previous group) gives its first D channels, the second half its last D;
    otherwise c = 1. `sources_PB` int32: v >= 0 row v of `rows_TE`, -1 absent (weight 0), v <= -2 row -(v + 2) of
    `state_NE`.
    """
    index = sources_PB.long()
    group = rows_TE[index.clamp(min=0)] if len(rows_TE) else rows_TE.new_zeros(*index.shape, rows_TE.shape[1])
    if state_NE is not None and len(state_NE):
        group = torch.where((index <= -2)[..., None], state_NE[(-index - 2).clamp(min=0)], group)
    kv_PBE, gate_PBE = group.chunk(2, dim=-1)
    if overlap:
        half, dim = index.shape[1] // 2, kv_PBE.shape[-1] // 2
        kv_PBE = torch.cat([kv_PBE[:, :half, :dim], kv_PBE[:, half:, dim:]], dim=1)
        gate_PBE = torch.cat([gate_PBE[:, :half, :dim], gate_PBE[:, half:, dim:]], dim=1)
    absent = (index == -1)[..., None]
    weight_PBD = gate_PBE.masked_fill(absent, float("-inf")).softmax(dim=1)
    return (weight_PBD * kv_PBE.masked_fill(absent, 0.0)).sum(dim=1).to(out_dtype)
