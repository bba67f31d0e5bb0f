"""bf16 times bf16 on the matrix units, fp32 sums, one rounding; packed weights stay with the reference."""

from __future__ import annotations

import torch

from spyglass.ops.linear_block import reference
from spyglass.quant.formats import FakeQuant
from spyglass.quant.packed import Packed


def usable(device_type: str, dtype: str) -> bool:
    """bf16 activations on a GPU."""
    return device_type == "cuda" and dtype == "bfloat16"


def linear_block(
    x_TI: torch.Tensor,
    weight: Packed,
    *,
    rounding: FakeQuant | None = None,
    addend_TO: torch.Tensor | None = None,
    bias_O: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `reference.py`. A bias of x's own dtype costs nothing, one in fp32 a pass over the fp32 product."""
    if rounding is not None or x_TI.dtype != torch.bfloat16 or weight.data.dtype != torch.bfloat16:
        return reference.linear_block(
            x_TI, weight, rounding=rounding, addend_TO=addend_TO, bias_O=bias_O, out_dtype=out_dtype
        )
    dtype = x_TI.dtype if out_dtype is None else out_dtype
    x_NI, weight_IO = x_TI.reshape(-1, x_TI.shape[-1]), weight.data.mT
    if addend_TO is None and dtype == x_TI.dtype and (bias_O is None or bias_O.dtype == dtype):
        out_NO = torch.mm(x_NI, weight_IO) if bias_O is None else torch.addmm(bias_O, x_NI, weight_IO)
    else:
        out_NO = _in_fp32(x_NI, weight_IO)
        if bias_O is not None:
            out_NO = out_NO + bias_O.float()
        if addend_TO is not None:
            out_NO = out_NO + addend_TO.reshape(out_NO.shape)
    return out_NO.to(dtype).view(*x_TI.shape[:-1], weight.shape[0])


def _in_fp32(x_NI: torch.Tensor, weight_IO: torch.Tensor) -> torch.Tensor:
    """The product before its rounding; where gradients are wanted, by widening first."""
    if torch.is_grad_enabled() and (x_NI.requires_grad or weight_IO.requires_grad):
        return x_NI.float() @ weight_IO.float()
    return torch.mm(x_NI, weight_IO, out_dtype=torch.float32)
