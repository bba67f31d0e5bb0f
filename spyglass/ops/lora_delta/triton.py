"""Two launches: rank rows times inputs, then only those that some row of a tile owns times outputs, in fp32."""

from __future__ import annotations

import torch

from spyglass.ops import gpu
from spyglass.ops.gpu import usable
from spyglass.ops.lora_delta import reference

__all__ = ["lora_delta", "usable"]


def lora_delta(
    x_TGI: torch.Tensor,
    adapter_T: torch.Tensor,
    a_RI: torch.Tensor,
    b_RGO: torch.Tensor,
    adapter_R: torch.Tensor,
    scale_R: torch.Tensor,
) -> torch.Tensor:
    """See `reference.py`, which also serves gradients."""
    if gpu.learns(x_TGI, a_RI, b_RGO, scale_R):
        return reference.lora_delta(x_TGI, adapter_T, a_RI, b_RGO, adapter_R, scale_R)
    import triton

    from spyglass.ops.lora_delta import triton_kernel as kernels

    (rows, groups, inner), (ranks, _, outer) = x_TGI.shape, b_RGO.shape
    out_TGO = torch.empty((rows, groups, outer), dtype=torch.float32, device=x_TGI.device)
    if rows == 0:
        return out_TGO
    u_TGR = torch.empty((rows, groups, ranks), dtype=torch.float32, device=x_TGI.device)
    adapter_T, adapter_R = adapter_T.contiguous(), adapter_R.contiguous()
    kernels.shrink[(triton.cdiv(rows, 16), triton.cdiv(ranks, 16), groups)](
        x_TGI.contiguous(), adapter_T, a_RI.contiguous(), adapter_R, scale_R.contiguous(), u_TGR, rows, ranks,
        G=groups, K=inner, BT=16, BR=16, BK=128, NS=3, num_warps=4,
    )  # fmt: skip
    kernels.expand[(triton.cdiv(rows, 16), triton.cdiv(outer, 128), groups)](
        u_TGR, adapter_T, b_RGO.contiguous(), adapter_R, out_TGO, rows, ranks,
        G=groups, N=outer, BT=16, BR=16, BN=128, num_warps=4,
    )  # fmt: skip
    return out_TGO
