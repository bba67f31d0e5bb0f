"""Full attention inside each picture of a packed batch (spec v4 9.3)."""

from __future__ import annotations

from itertools import pairwise

import torch


def vit_attention(
    q_UHD: torch.Tensor, k_UHD: torch.Tensor, v_UHD: torch.Tensor, cu_seqlens: tuple[int, ...], *, scale: float
) -> torch.Tensor:
    """out_UHD = softmax(scale · q kᵀ) v over the patches of the same picture; `cu_seqlens` are host offsets, I + 1 of
    them.

    Memory is linear in patches (the fused attention of torch). Output has q's dtype.
    """
    parts = []
    for start, stop in pairwise(cu_seqlens):
        q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (q_UHD, k_UHD, v_UHD))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts) if parts else torch.empty_like(v_UHD)
