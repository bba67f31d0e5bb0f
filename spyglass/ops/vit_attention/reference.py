"""Full attention inside each image of a packed batch (spec v4 9.3)."""

from __future__ import annotations

from itertools import pairwise

import torch

CAPABILITIES: frozenset[str] = frozenset()  # it asks the host which rows belong together


def vit_attention(
    q_UHD: torch.Tensor,
    k_UHD: torch.Tensor,
    v_UHD: torch.Tensor,
    cu_seqlens_I1: torch.Tensor,
    *,
    offsets: tuple[int, ...],
    scale: float,
) -> torch.Tensor:
    """out_uhd = sum_w softmax_w(scale · q_uh·k_wh) v_wh over the patches w of u's image.

    `offsets` are the I + 1 boundaries of the images on the host, `cu_seqlens_I1` the same numbers (int32) on the
    device; an implementation reads whichever it can, and never one back. Logits and softmax are fp32 or better, the
    output has q's dtype. Memory is linear in patches (torch's fused attention).
    """
    assert q_UHD.shape == k_UHD.shape == v_UHD.shape, (q_UHD.shape, k_UHD.shape, v_UHD.shape)
    assert offsets[0] == 0 and offsets[-1] == len(q_UHD) and len(offsets) == len(cu_seqlens_I1), (offsets, len(q_UHD))
    parts = []
    for start, stop in pairwise(offsets):
        q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (q_UHD, k_UHD, v_UHD))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts) if parts else torch.empty_like(v_UHD)
