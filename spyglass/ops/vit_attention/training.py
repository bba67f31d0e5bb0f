"""Whichever of torch's own attentions can run here: all images in one launch, or one after another."""

from __future__ import annotations

import torch

from spyglass.ops.vit_attention import reference, varlen


def vit_attention(
    q_UHD: torch.Tensor,
    k_UHD: torch.Tensor,
    v_UHD: torch.Tensor,
    cu_seqlens_I1: torch.Tensor,
    *,
    offsets: tuple[int, ...],
    scale: float,
) -> torch.Tensor:
    """See `reference.py`. Both differentiate themselves."""
    dtype = str(q_UHD.dtype).removeprefix("torch.")
    at_once = varlen.usable(q_UHD.device.type, dtype) and q_UHD.shape[-1] % 8 == 0 and q_UHD.shape[-1] <= 256
    op = varlen.vit_attention if at_once else reference.vit_attention
    return op(q_UHD, k_UHD, v_UHD, cu_seqlens_I1, offsets=offsets, scale=scale)
