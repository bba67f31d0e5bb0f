"""All images in one launch: torch's variable-length flash attention."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.attention.varlen import varlen_attn

from spyglass.errors import DeviceError


def usable(device_type: str, dtype: str) -> bool:
    """Half precision on a GPU; float32 stays with the reference."""
    return device_type == "cuda" and dtype in ("bfloat16", "float16")


def vit_attention(
    q_UHD: torch.Tensor,
    k_UHD: torch.Tensor,
    v_UHD: torch.Tensor,
    cu_seqlens_I1: torch.Tensor,
    *,
    offsets: tuple[int, ...],
    scale: float,
) -> torch.Tensor:
    """See `reference.py`. Raises DeviceError for a head that flash attention cannot hold."""
    if q_UHD.shape[-1] % 8 or q_UHD.shape[-1] > 256:
        raise DeviceError(
            f"flash attention needs a head of a multiple of 8 up to 256 channels, this tower has {q_UHD.shape[-1]}; "
            "load the model with ops='reference'"
        )
    longest = max((stop - start for start, stop in pairwise(offsets)), default=0)
    if longest == 0:
        return torch.empty_like(v_UHD)
    out = varlen_attn(q_UHD, k_UHD, v_UHD, cu_seqlens_I1, cu_seqlens_I1, longest, longest, scale=scale)
    assert isinstance(out, torch.Tensor)
    return out
