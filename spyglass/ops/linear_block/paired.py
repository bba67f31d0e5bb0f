"""A map and the adapter beside it as one product, with a backward of the same kind; for matrix units (bf16).

    out = [x' | u] [W | b]ᵀ,  u = scale · (x aᵀ),  x' = round(x)
    du = scale · (g b),  dx = g W + du a,  da = duᵀ x,  db = uᵀ g

Factors of a rank row are fp32: see `triton_training.py` for how they go through a bf16 product without loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from spyglass.ops import gpu
from spyglass.ops.lora_delta.rank_rows import RankRows
from spyglass.quant.formats import FakeQuant
from spyglass.quant.packed import Packed

_ALIGNED = 8  # values, of a row that matrix units read


def suits(x: torch.Tensor, weight: Packed, rounding: FakeQuant | None) -> bool:
    """Whether a frozen weight of this format and rows of this dtype are multiplied here."""
    inputs = weight.shape[-1]
    if not (gpu.trains(x) and gpu.multiplies(x.dtype)) or weight.data.requires_grad or weight.tiled:
        return False
    if rounding is not None and not rounds(rounding, inputs):
        return False
    return inputs % 32 == 0 and weight.shape[-2] % 8 == 0 and exact(weight, x.dtype)


def rounds(rounding: FakeQuant, width: int) -> bool:
    """Whether kernels round rows of this width so."""
    return width % rounding.block == 0 and rounding.block & (rounding.block - 1) == 0 and rounding.block <= 1024


def exact(weight: Packed, dtype: torch.dtype) -> bool:
    """Whether the weight is made of numbers of this dtype, or kernels decode it to such."""
    format = weight.format
    if format.block is None or weight.scale is None:
        return weight.data.dtype == dtype
    return format.name in ("fp4", "fp8") and format.scale_dtype == "F8_E8M0" and format.block[1] % 32 == 0


def linear(
    x_TI: torch.Tensor,
    weight: Packed,
    rounding: FakeQuant | None,
    pair: RankRows | None,
    bias_O: torch.Tensor | None,
) -> torch.Tensor:
    """`linear_block` in x's dtype."""
    x_NI = x_TI.reshape(-1, x_TI.shape[-1])
    return _apply(x_NI[:, None], weight, rounding, pair, bias_O).view(*x_TI.shape[:-1], weight.shape[0])


def grouped(x_TGI: torch.Tensor, weight: Packed, pair: RankRows | None) -> torch.Tensor:
    """`linear_grouped`."""
    return _apply(x_TGI, weight, None, pair, None)


@dataclass(frozen=True, slots=True)
class _Frozen:
    """What has no gradient. No rows: the graph of a layer that is computed again would hold them meanwhile."""

    weight: Packed
    rounding: FakeQuant | None
    bias_O: torch.Tensor | None
    adapter_ids: tuple[torch.Tensor, torch.Tensor] | None
    scale_R: torch.Tensor | None

    def low_rank(self, a_RI: torch.Tensor, b_RGO: torch.Tensor) -> Any:
        """The rank rows of every group, which share a."""
        from spyglass.ops.linear_block.low_rank import LowRank

        assert self.scale_R is not None
        groups = b_RGO.shape[1]
        scale_GR = self.scale_R.expand(groups, -1).contiguous()
        return LowRank(a_RI.expand(groups, *a_RI.shape), b_RGO.transpose(0, 1), scale_GR, self.adapter_ids)

    def values(self, x: torch.Tensor, groups: int, width: int) -> torch.Tensor:
        """The weight as numbers in rows of `width` [G, O, width]; what is behind them is not written."""
        from spyglass.ops.linear_block.triton_training import decode_into

        data, (outputs, inputs) = self.weight.data, self.weight.shape
        if self.weight.scale is None and width == inputs:
            return data.view(groups, -1, inputs)
        out_OK = x.new_empty(outputs, width)
        if self.weight.scale is None:
            out_OK[:, :inputs] = data
        else:
            assert self.weight.scale is not None
            decode_into(data[None], self.weight.scale[None], self.weight.format, out_OK[None, :, :inputs])
        return out_OK.view(groups, -1, width)


def _apply(
    x_NGI: torch.Tensor,
    weight: Packed,
    rounding: FakeQuant | None,
    pair: RankRows | None,
    bias_O: torch.Tensor | None,
) -> torch.Tensor:
    adapter_ids = None if pair is None else (pair.adapter_T.contiguous(), pair.adapter_R.contiguous())
    frozen = _Frozen(weight, rounding, bias_O, adapter_ids, None if pair is None else pair.scale_R)
    learnt: tuple[torch.Tensor | None, ...] = (None, None, None)
    if pair is not None:
        same = pair.x_TGI.data_ptr() == x_NGI.data_ptr()  # not where some inputs of the adapter are dropped
        learnt = (None if same else pair.x_TGI, pair.a_RI, pair.b_RGO)
    out_NGO: torch.Tensor = _Paired.apply(x_NGI, *learnt, frozen)  # type: ignore[no-untyped-call]
    return out_NGO


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NGI: torch.Tensor,
        low_NGI: torch.Tensor | None,
        a_RI: torch.Tensor | None,
        b_RGO: torch.Tensor | None,
        frozen: _Frozen,
    ) -> torch.Tensor:
        from spyglass.ops.linear_block import triton_training as kernels
        from spyglass.ops.linear_block.low_rank import ALIGNED, columns_of, product

        rows, groups, inputs = x_NGI.shape
        rank_rows = None if a_RI is None or b_RGO is None else frozen.low_rank(a_RI, b_RGO)
        bias = inputs + (0 if rank_rows is None else rank_rows.columns)
        width = bias + (0 if frozen.bias_O is None else ALIGNED)
        right_GOK = frozen.values(x_NGI, groups, width)
        left_NGK, u_GNR = x_NGI, None
        if width > inputs or frozen.rounding is not None:
            left_NGK = x_NGI.new_empty(rows, groups, width)
            flat_XI = x_NGI.reshape(-1, inputs)
            kernels.round_into(flat_XI, left_NGK.view(-1, width)[:, :inputs], frozen.rounding)
        if rank_rows is not None:
            low = (x_NGI if low_NGI is None else low_NGI).transpose(0, 1)
            u_GNR = rank_rows.put_left(low, left_NGK[:, :, inputs:bias].transpose(0, 1))
            rank_rows.put_right(right_GOK[:, :, inputs:bias])
        if frozen.bias_O is not None:
            left_NGK[:, :, bias:] = 1.0
            columns = columns_of(right_GOK[:, :, bias:], 1, kernels.EACH)
            kernels.place_parts(frozen.bias_O.float().view(groups, -1, 1), columns, kernels.EACH)
        ctx.save_for_backward(x_NGI, low_NGI, a_RI, b_RGO, u_GNR)
        ctx.frozen = frozen
        return product(left_NGK.transpose(0, 1), right_GOK.mT, x_NGI.dtype).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from spyglass.ops.linear_block.low_rank import of_weight, product

        x_NGI, low_NGI, a_RI, b_RGO, u_GNR = ctx.saved_tensors
        frozen: _Frozen = ctx.frozen
        _, groups, inputs = x_NGI.shape
        grad_GNO = grads[0].contiguous().transpose(0, 1)
        dx_GNI = dlow_GNI = da_RI = db_RGO = None
        if ctx.needs_input_grad[0]:
            dx_GNI = product(grad_GNO, frozen.values(x_NGI, groups, inputs), x_NGI.dtype)
        if a_RI is not None:
            rank_rows = frozen.low_rank(a_RI, b_RGO)
            left_GNK, du_GNR = rank_rows.gradient(grad_GNO)
            if low_NGI is not None and ctx.needs_input_grad[1]:
                dlow_GNI = low_NGI.new_zeros(low_NGI.shape).transpose(0, 1)
            into = dx_GNI if low_NGI is None else dlow_GNI
            if into is not None:
                rank_rows.add_input(left_GNK, into)
            low_GNI = (x_NGI if low_NGI is None else low_NGI).transpose(0, 1)
            da_RI = of_weight(du_GNR, low_GNI).sum(dim=0).to(a_RI.dtype)
            db_RGO = of_weight(u_GNR, grad_GNO).transpose(0, 1).to(b_RGO.dtype)
        dx_NGI, dlow_NGI = (None if one is None else one.transpose(0, 1) for one in (dx_GNI, dlow_GNI))
        return dx_NGI, dlow_NGI, da_RI, db_RGO, None
