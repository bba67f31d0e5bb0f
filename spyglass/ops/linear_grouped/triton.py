"""The blocks of a block-diagonal FP8 or bf16 matrix in one launch: kernels of `linear_block`."""

from __future__ import annotations

import torch

from spyglass.ops import gpu
from spyglass.ops.linear_block import triton as linear
from spyglass.ops.linear_grouped import reference
from spyglass.quant.packed import Packed


def usable(device_type: str, dtype: str) -> bool:
    """bf16 activations wherever Triton is."""
    return linear.usable(device_type, dtype)


def linear_grouped(
    x_TGI: torch.Tensor,
    weight: Packed,
    *,
    addend_TGO: torch.Tensor | None = None,
    launch: linear.Few | linear.Many | linear.Expanded | None = None,
) -> torch.Tensor:
    """See `reference.py`, which also serves fp32 activations, gradients and odd shapes or formats."""
    rows, groups, _ = x_TGI.shape
    if not linear.suits(x_TGI, weight, None, rows, groups) or gpu.learns(x_TGI, weight.data, addend_TGO):
        return reference.linear_grouped(x_TGI, weight, addend_TGO=addend_TGO)
    from spyglass.ops.linear_block import triton_launch

    out_TGO = torch.empty((rows, groups, weight.shape[0] // groups), dtype=x_TGI.dtype, device=x_TGI.device)
    triton_launch.multiply(
        x_TGI.contiguous(),
        weight,
        out_TGO,
        block=0,
        groups=groups,
        addend=None if addend_TGO is None else addend_TGO.contiguous(),
        bias=None,
        launch=launch,
    )
    return out_TGO
