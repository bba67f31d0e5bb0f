"""The same product with a backward that keeps packed weights packed: each pass decodes them for itself.

d out / d x = W, through the rounding as if it were the identity. A plain weight may want a gradient too. On a GPU an
adapter's rank rows are columns of the one product, and so are its gradients (`paired.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from spyglass.ops.fake_quant.training import fake_quant
from spyglass.ops.linear_block import paired
from spyglass.ops.lora_delta.rank_rows import RankRows
from spyglass.quant.codec import decode
from spyglass.quant.formats import FakeQuant, Format
from spyglass.quant.packed import Packed

CAPABILITIES = frozenset({"capturable", "joins_rank_rows"})


def linear_block(
    x_TI: torch.Tensor,
    weight: Packed,
    *,
    rounding: FakeQuant | None = None,
    addend_TO: torch.Tensor | RankRows | None = None,
    bias_O: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `reference.py`. The addend may be rank rows that are not multiplied out."""
    dtype = x_TI.dtype if out_dtype is None else out_dtype
    if dtype == x_TI.dtype and not isinstance(addend_TO, torch.Tensor) and paired.suits(x_TI, weight, rounding):
        return paired.linear(x_TI, weight, rounding, addend_TO, bias_O)
    x = x_TI if rounding is None else fake_quant(x_TI, rounding)
    out: torch.Tensor = Product.apply(x.reshape(-1, x.shape[-1]), weight.data, weight.scale, weight.format)  # type: ignore[no-untyped-call]
    out = out.view(*x.shape[:-1], -1)
    if bias_O is not None:
        out = out + bias_O.float()
    if isinstance(addend_TO, RankRows):
        addend_TO = addend_TO.multiplied().view(out.shape)
    if addend_TO is not None:
        out = out + addend_TO
    return out.to(dtype)


class Product(torch.autograd.Function):
    """x Wᵀ in fp32. What is kept for the backward: the weight as stored, and x only if the weight is trained."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None, format: Format
    ) -> torch.Tensor:
        ctx.format, ctx.dtype = format, x_NI.dtype
        ctx.save_for_backward(x_NI if ctx.needs_input_grad[1] else None, data, scale)
        return multiply(x_NI, values_for(x_NI, data, scale, format).mT)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        (grad_NO,) = grads
        x_NI, data, scale = ctx.saved_tensors
        grad_x = grad_data = None
        if ctx.needs_input_grad[0]:
            weight_OI = values_for(grad_NO.to(ctx.dtype), data, scale, ctx.format)
            grad_x = multiply(grad_NO.to(weight_OI.dtype), weight_OI).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_data = multiply(grad_NO.to(x_NI.dtype).mT, x_NI).to(data.dtype)
        return grad_x, grad_data, None, None


def values_for(x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None, format: Format) -> torch.Tensor:
    """The weight as numbers [out, in]: bf16 where a matrix unit can take it and it is exact, else fp32.

    A weight of a packed format without scales has its values already (`train.masters`).
    """
    if format.block is not None and scale is None:
        return data if _on_matrix_units(x) and data.dtype == torch.bfloat16 else data.float()
    shape = (*data.shape[:-1], data.shape[-1] * 2) if format.name == "fp4" else tuple(data.shape)
    exact = format.scale_dtype == "F8_E8M0" or format.name == "bf16"
    dtype = torch.bfloat16 if _on_matrix_units(x) and exact else torch.float32
    return decode(Packed(format, data, scale, shape), dtype)


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in fp32 of matrices, or of stacks of them; bf16 operands on a GPU are summed in fp32."""
    if _on_matrix_units(a) and a.dtype == b.dtype:
        product = torch.mm if a.dim() == 2 else torch.bmm
        out: torch.Tensor = product(a, b, out_dtype=torch.float32)
        return out
    return a.float() @ b.float()


def _on_matrix_units(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16
