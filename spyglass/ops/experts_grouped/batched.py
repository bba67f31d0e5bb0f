"""The experts of training on matrix units: forward and backward of a chunk in batched bf16 products.

Left and right of a product are [u1 | x' | u3] with [b1 | W1] and [W3 | b3], then [z' | u2] with [W2 | b2], where x' and
z' are rounded and u are the rank rows' numbers of the un-rounded ones (see `linear_block/low_rank.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from spyglass.ops import gpu
from spyglass.ops.linear_block import paired
from spyglass.quant.formats import FakeQuant
from spyglass.quant.packed import Packed

if TYPE_CHECKING:
    from spyglass.ops.experts_grouped.training import Chunk, ExpertPair, Layout
    from spyglass.ops.linear_block.low_rank import LowRank

MATRICES = ("w1", "w3", "w2")


def suits(x_TC: torch.Tensor, stacks: tuple[Packed, ...], rounding: FakeQuant | None) -> bool:
    """Whether frozen experts of these formats and rows of this dtype are multiplied here."""
    if not (gpu.trains(x_TC) and gpu.multiplies(x_TC.dtype)):
        return False
    if any(stack.data.requires_grad or stack.tiled for stack in stacks):
        return False
    widths = stacks[0].shape[1:]
    if rounding is not None and not all(paired.rounds(rounding, width) for width in widths):
        return False
    return all(width % 32 == 0 for width in widths) and all(paired.exact(stack, x_TC.dtype) for stack in stacks)


@dataclass(frozen=True, slots=True)
class Frozen:
    """What has no gradient; `scales` of the rank rows by matrix, [E, R]."""

    stacks: Mapping[str, Packed]
    layout: Layout
    limit: float
    rounding: FakeQuant | None
    scales: Mapping[str, torch.Tensor]


def experts(
    x_TC: torch.Tensor, weights_TK: torch.Tensor, frozen: Frozen, pairs: Mapping[str, ExpertPair]
) -> torch.Tensor:
    """`experts_grouped` over a layout that has chunks; pairs without dropout."""
    leaves = [leaf for name in MATRICES for leaf in _leaves(pairs.get(name))]
    out_TC: torch.Tensor = _Experts.apply(x_TC.contiguous(), weights_TK.contiguous(), frozen, *leaves)  # type: ignore[no-untyped-call]
    return out_TC


def _leaves(pair: ExpertPair | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if pair is None else (pair.a_ERI, pair.b_ERO)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TC: torch.Tensor, weights_TK: torch.Tensor, frozen: Frozen, *leaves: torch.Tensor | None
    ) -> torch.Tensor:
        from spyglass.ops.experts_grouped.triton_training import sum_rows

        layout = frozen.layout
        y_MC = x_TC.new_empty(layout.rows, x_TC.shape[1])
        kept: list[torch.Tensor | None] = []
        for chunk, first in layout.placed():
            kept += _Chunk(frozen, chunk, first, leaves).forward(x_TC, weights_TK, y_MC)
        out_TC = torch.empty(x_TC.shape, dtype=torch.float32, device=x_TC.device)
        sum_rows(y_MC, layout.place_TK, out_TC)
        ctx.save_for_backward(x_TC, weights_TK, *leaves, *kept)
        ctx.frozen = frozen
        return out_TC

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from spyglass.ops.experts_grouped.triton_training import sum_rows

        x_TC, weights_TK, *rest = ctx.saved_tensors
        frozen: Frozen = ctx.frozen
        leaves, kept = rest[: 2 * len(MATRICES)], rest[2 * len(MATRICES) :]
        layout = frozen.layout
        grad_TC = grads[0].to(x_TC.dtype).contiguous()
        dx_MC = x_TC.new_empty(layout.rows, x_TC.shape[1])
        dweight_M = torch.empty(layout.rows + 1, dtype=torch.float32, device=x_TC.device)
        dleaves = [None if leaf is None else torch.zeros_like(leaf) for leaf in leaves]
        for number, (chunk, first) in enumerate(layout.placed()):
            part = _Chunk(frozen, chunk, first, leaves)
            saved = kept[_KEPT * number : _KEPT * (number + 1)]
            part.backward(x_TC, weights_TK, grad_TC, saved, dx_MC, dweight_M, dleaves)
        dx_TC = torch.empty_like(x_TC)
        sum_rows(dx_MC, layout.place_TK, dx_TC)
        dweight_M[-1] = 0.0  # where choices lie that have no row
        dweights_TK = dweight_M[layout.place_N].view(weights_TK.shape).to(weights_TK.dtype)
        return dx_TC, dweights_TK, None, *dleaves


_KEPT = 5  # tensors that a chunk keeps: gate, up, and u of each matrix


class _Chunk:
    """Some experts with as many rows each, from row `first` of the layout."""

    def __init__(self, frozen: Frozen, chunk: Chunk, first: int, leaves: tuple[torch.Tensor | None, ...]) -> None:
        from spyglass.ops.linear_block.low_rank import LowRank

        self._frozen, self._experts_G, self._rows = frozen, chunk.experts_G, slice(first, first + chunk.rows)
        self._shape = (len(chunk.experts_G), chunk.height, -1)
        self._low: dict[str, LowRank] = {}
        for name, a_ERI, b_ERO in zip(MATRICES, leaves[::2], leaves[1::2], strict=True):
            if a_ERI is not None and b_ERO is not None:
                whole = (a_ERI, b_ERO, frozen.scales[name])
                a, b, scale = (part.index_select(0, chunk.experts_G) for part in whole)
                self._low[name] = LowRank(a, b, scale)

    def forward(self, x_TC: torch.Tensor, weights_TK: torch.Tensor, y_MC: torch.Tensor) -> list[torch.Tensor | None]:
        """Write the experts' outputs into the chunk's rows of y; what the backward needs."""
        from spyglass.ops.experts_grouped.triton_training import gate_rows, spread_rows
        from spyglass.ops.linear_block.low_rank import product, write_product

        frozen, layout, rows = self._frozen, self._frozen.layout, self._rows
        width, hidden = frozen.stacks["w1"].shape[1:]
        before, after, behind = (self._columns(name) for name in MATRICES)
        count = rows.stop - rows.start
        left_MK = x_TC.new_empty(count, before + hidden + after)
        plain_MC = x_TC.new_empty(count, hidden) if before or after else None
        source_M = layout.token_M[rows]
        spread_rows(x_TC, source_M, plain_MC, left_MK[:, before : before + hidden], frozen.rounding)
        left_GHK = left_MK.view(self._shape)
        u1 = self._put_left("w1", plain_MC, left_GHK[:, :, :before])
        u3 = self._put_left("w3", plain_MC, left_GHK[:, :, before + hidden :])
        gate_MF, up_MF = (
            product(left, self._right(name, x_TC, at).mT, x_TC.dtype).flatten(0, 1)
            for name, left, at in (
                ("w1", left_GHK[:, :, : before + hidden], before),
                ("w3", left_GHK[:, :, before:], 0),
            )
        )
        z_MF = x_TC.new_empty(count, width)
        left_MK = x_TC.new_empty(count, width + behind)
        weight_N, choice_M = weights_TK.view(-1), layout.choice_M[rows]
        gate_rows(gate_MF, up_MF, weight_N, choice_M, frozen.limit, z_MF, left_MK[:, :width], frozen.rounding)
        left_GHK = left_MK.view(self._shape)
        u2 = self._put_left("w2", z_MF, left_GHK[:, :, width:])
        write_product(left_GHK, self._right("w2", x_TC, 0).mT, y_MC[rows].view(self._shape))
        return [gate_MF, up_MF, u1, u3, u2]

    def backward(
        self,
        x_TC: torch.Tensor,
        weights_TK: torch.Tensor,
        grad_TC: torch.Tensor,
        kept: list[torch.Tensor],
        dx_MC: torch.Tensor,
        dweight_M: torch.Tensor,
        dleaves: list[torch.Tensor | None],
    ) -> None:
        """Write the chunk's rows of dx and of the weights' gradients, and its experts' part of `dleaves`."""
        from spyglass.ops.experts_grouped.triton_training import gate_gradient, gate_rows, spread_rows
        from spyglass.ops.linear_block.low_rank import of_weight, product, write_product

        frozen, layout, rows = self._frozen, self._frozen.layout, self._rows
        gate_MF, up_MF, u1, u3, u2 = kept
        count, width = gate_MF.shape
        weight_N, choice_M, source_M = weights_TK.view(-1), layout.choice_M[rows], layout.token_M[rows]
        grad_MC = x_TC.new_empty(count, x_TC.shape[1])
        spread_rows(grad_TC, source_M, grad_MC, None, None)
        grad_GHC = grad_MC.view(self._shape)
        dz_GHF = product(grad_GHC, self._values(x_TC, "w2"), x_TC.dtype)
        if "w2" in self._low:
            z_MF = torch.empty_like(gate_MF)
            gate_rows(gate_MF, up_MF, weight_N, choice_M, frozen.limit, z_MF)
            left, du = self._low["w2"].gradient(grad_GHC)
            self._low["w2"].add_input(left, dz_GHF)
            self._learn(dleaves, "w2", of_weight(du, z_MF.view(self._shape)), of_weight(u2, grad_GHC))
        dboth_MF = gate_MF.new_empty(count, 2 * width)
        dgate_MF, dup_MF = dboth_MF.chunk(2, dim=1)
        gate_gradient(
            *(gate_MF, up_MF, weight_N, choice_M, frozen.limit, dz_GHF.flatten(0, 1), dgate_MF, dup_MF),
            dweight_M[:-1][rows],
        )
        dx_GHC = dx_MC[rows].view(self._shape)
        write_product(dboth_MF.view(self._shape), self._values(x_TC, "w1", "w3"), dx_GHC)
        if "w1" in self._low or "w3" in self._low:
            plain_MC = grad_MC  # which is not wanted any more
            spread_rows(x_TC, source_M, plain_MC, None, None)
            plain_GHC = plain_MC.view(self._shape)
            for name, dout_MF, u in (("w1", dgate_MF, u1), ("w3", dup_MF, u3)):
                if name in self._low:
                    dout_GHF = dout_MF.unflatten(0, self._shape[:2])
                    left, du = self._low[name].gradient(dout_GHF)
                    self._low[name].add_input(left, dx_GHC)
                    self._learn(dleaves, name, of_weight(du, plain_GHC), of_weight(u, dout_GHF))

    def _columns(self, name: str) -> int:
        return self._low[name].columns if name in self._low else 0

    def _put_left(self, name: str, x_MI: torch.Tensor | None, left_GHK: torch.Tensor) -> torch.Tensor | None:
        if name not in self._low or x_MI is None:
            return None
        return self._low[name].put_left(x_MI.view(self._shape), left_GHK)

    def _right(self, name: str, x: torch.Tensor, at: int) -> torch.Tensor:
        """The right side [G, O, K] of a product: the matrices from column `at` on, the rank rows beside them."""
        stack, columns = self._frozen.stacks[name], self._columns(name)
        outputs, inputs = stack.shape[1:]
        right_GOK = x.new_empty(len(self._experts_G), outputs, inputs + columns)
        self._put_values(stack, right_GOK[:, :, at : at + inputs])
        if columns:
            self._low[name].put_right(right_GOK[:, :, inputs:] if at == 0 else right_GOK[:, :, :at])
        return right_GOK

    def _values(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        """The matrices of some stacks, rows below one another, [G, O, I]."""
        stacks = [self._frozen.stacks[name] for name in names]
        heights = [stack.shape[1] for stack in stacks]
        out_GOI = x.new_empty(len(self._experts_G), sum(heights), stacks[0].shape[2])
        for stack, part in zip(stacks, out_GOI.split(heights, dim=1), strict=True):
            self._put_values(stack, part)
        return out_GOI

    def _put_values(self, stack: Packed, out_GOI: torch.Tensor) -> None:
        from spyglass.ops.linear_block.triton_training import decode_into

        if stack.scale is None:
            out_GOI.copy_(stack.data.index_select(0, self._experts_G))
        else:
            decode_into(stack.data, stack.scale, stack.format, out_GOI, self._experts_G)

    def _learn(self, dleaves: list[torch.Tensor | None], name: str, da: torch.Tensor, db: torch.Tensor) -> None:
        at = 2 * MATRICES.index(name)
        for into, part in zip(dleaves[at : at + 2], (da, db), strict=True):
            assert into is not None
            into.index_copy_(0, self._experts_G, part.to(into.dtype))
