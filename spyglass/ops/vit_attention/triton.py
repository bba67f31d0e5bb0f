"""All images in one launch, about half as fast again as torch's flash attention on long images (docs/log.md).

Where images end is read on the device and the grid follows from the longest image alone, so a graph can hold it.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise

import torch

from spyglass.ops.vit_attention import varlen

_HEAD_DIMS = (32, 64, 128)


def usable(device_type: str, dtype: str) -> bool:
    """Half precision wherever Triton is; float32 stays with the reference."""
    return varlen.usable(device_type, dtype) and find_spec("triton") is not None


def vit_attention(
    q_UHD: torch.Tensor,
    k_UHD: torch.Tensor,
    v_UHD: torch.Tensor,
    cu_seqlens_I1: torch.Tensor,
    *,
    offsets: tuple[int, ...],
    scale: float,
) -> torch.Tensor:
    """See `reference.py`. Gradients and other head sizes go through torch's flash attention."""
    inputs = (q_UHD, k_UHD, v_UHD)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if learns or q_UHD.shape[-1] not in _HEAD_DIMS or any(x.stride(-1) != 1 for x in inputs):
        return varlen.vit_attention(q_UHD, k_UHD, v_UHD, cu_seqlens_I1, offsets=offsets, scale=scale)
    from spyglass.ops.vit_attention.triton_kernel import attend

    out_UHD = torch.empty(q_UHD.shape, dtype=q_UHD.dtype, device=q_UHD.device)
    longest = max((stop - start for start, stop in pairwise(offsets)), default=0)
    attend(q_UHD, k_UHD, v_UHD, out_UHD, cu_seqlens_I1, longest, scale)
    return out_UHD
