"""One launch, one read and one write, where the reference makes nine passes; the same bits."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from spyglass.ops.rope_half import reference


def usable(device_type: str, dtype: str) -> bool:
    """Wherever Triton is."""
    return device_type == "cuda" and find_spec("triton") is not None


def rope_half(x_UHD: torch.Tensor, cos_UR: torch.Tensor, sin_UR: torch.Tensor) -> torch.Tensor:
    """See `reference.py`, which also serves gradients."""
    if x_UHD.stride(-1) != 1 or (torch.is_grad_enabled() and x_UHD.requires_grad):
        return reference.rope_half(x_UHD, cos_UR, sin_UR)
    from spyglass.ops.rope_half.triton_kernel import turn

    out_UHD = torch.empty(x_UHD.shape, dtype=x_UHD.dtype, device=x_UHD.device)
    turn(x_UHD, cos_UR.contiguous(), sin_UR.contiguous(), out_UHD)
    return out_UHD
