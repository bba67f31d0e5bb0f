"""The same product with a backward that keeps packed weights packed (see `linear_block/training.py`)."""

from __future__ import annotations

from typing import Any

import torch

from spyglass.ops.linear_block import paired
from spyglass.ops.linear_block.training import multiply, values_for
from spyglass.ops.lora_delta.rank_rows import RankRows
from spyglass.quant.formats import Format
from spyglass.quant.packed import Packed

CAPABILITIES = frozenset({"capturable", "joins_rank_rows"})


def linear_grouped(
    x_TGI: torch.Tensor, weight: Packed, *, addend_TGO: torch.Tensor | RankRows | None = None
) -> torch.Tensor:
    """See `reference.py`. The addend may be rank rows that are not multiplied out."""
    if not isinstance(addend_TGO, torch.Tensor) and paired.suits(x_TGI, weight, None):
        return paired.grouped(x_TGI, weight, addend_TGO)
    out_TGO: torch.Tensor = _Product.apply(x_TGI, weight.data, weight.scale, weight.format)  # type: ignore[no-untyped-call]
    if isinstance(addend_TGO, RankRows):
        addend_TGO = addend_TGO.multiplied()
    if addend_TGO is not None:
        out_TGO = out_TGO + addend_TGO
    return out_TGO.to(x_TGI.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TGI: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None, format: Format
    ) -> torch.Tensor:
        ctx.format, ctx.dtype, ctx.groups = format, x_TGI.dtype, x_TGI.shape[1]
        ctx.save_for_backward(x_TGI if ctx.needs_input_grad[1] else None, data, scale)
        weight_GOI = values_for(x_TGI, data, scale, format).unflatten(0, (ctx.groups, -1))
        return multiply(x_TGI.transpose(0, 1), weight_GOI.mT).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        grad_GTO = grads[0].transpose(0, 1)
        x_TGI, data, scale = ctx.saved_tensors
        grad_x = grad_data = None
        if ctx.needs_input_grad[0]:
            values = values_for(grad_GTO.to(ctx.dtype), data, scale, ctx.format)
            weight_GOI = values.unflatten(0, (ctx.groups, -1))
            grad_x = multiply(grad_GTO.to(weight_GOI.dtype), weight_GOI).transpose(0, 1).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_data = multiply(grad_GTO.to(x_TGI.dtype).mT, x_TGI.transpose(0, 1)).flatten(0, 1).to(data.dtype)
        return grad_x, grad_data, None, None
