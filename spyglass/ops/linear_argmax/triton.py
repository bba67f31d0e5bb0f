"""The product without its results: each program keeps the largest of its outputs, one more the largest of those."""

from __future__ import annotations

import torch

from spyglass.ops.linear_argmax import reference
from spyglass.ops.linear_block import triton as linear
from spyglass.quant.packed import Packed

CAPABILITIES = frozenset({"capturable", "saves_logits"})


def usable(device_type: str, dtype: str) -> bool:
    """bf16 activations wherever Triton is."""
    return linear.usable(device_type, dtype)


def linear_argmax(x_TI: torch.Tensor, weight: Packed, skip_O: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.py`, which also serves fp32 activations, gradients and odd shapes or formats."""
    few = linear.suits(x_TI, weight, None, len(x_TI))
    wide = len(x_TI) > linear.FEW and weight.format.name == "bf16" and x_TI.dtype == torch.bfloat16
    if not (few and len(x_TI) <= linear.FEW) and not wide:
        return reference.linear_argmax(x_TI, weight, skip_O)
    from spyglass.ops.linear_block import triton_launch

    return triton_launch.largest(x_TI.contiguous(), weight, skip_O.contiguous())
