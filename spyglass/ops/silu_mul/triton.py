"""One launch and one pass over both halves, where torch makes two over strided rows."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from spyglass.ops.silu_mul import reference


def usable(device_type: str, dtype: str) -> bool:
    """Wherever Triton is."""
    return device_type == "cuda" and find_spec("triton") is not None


def silu_mul(x_UF: torch.Tensor) -> torch.Tensor:
    """See `reference.py`, which also serves gradients and float64."""
    if x_UF.dtype == torch.float64 or (torch.is_grad_enabled() and x_UF.requires_grad):
        return reference.silu_mul(x_UF)
    from spyglass.ops.silu_mul.triton_kernel import gate

    rows_NF = x_UF.reshape(-1, x_UF.shape[-1]).contiguous()
    out_NF = torch.empty(len(rows_NF), x_UF.shape[-1] // 2, dtype=x_UF.dtype, device=x_UF.device)
    gate(rows_NF, out_NF)
    return out_NF.view(*x_UF.shape[:-1], x_UF.shape[-1] // 2)
