"""Workspaces and launches of `triton_kernel.py`; importing it needs Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from spyglass.ops.experts_grouped import triton_kernel as kernels
from spyglass.ops.gpu import interpreted
from spyglass.ops.linear_block.triton_kernel import round_rows
from spyglass.ops.linear_block.triton_launch import ahead, options, registers
from spyglass.quant.packed import Packed

if TYPE_CHECKING:
    from spyglass.ops.experts_grouped.triton import Few, Many

_BLOCK = 8  # choices of a block of few rows
_SLICE = 8  # choices that one program of few lists
_PART = 512  # choices that one program lists


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Checked arguments of the op; `block` of the rounding, 0 without; `bits` of a weight."""

    x_TC: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    w1: Packed
    w3: Packed
    w2: Packed
    limit: float
    block: int
    bits: int

    def order(self, weight: Packed, many: bool) -> int:
        """In which order a product with `weight` reads its input (see `round_rows`)."""
        return (41 if many else 0) if weight.tiled else 40 if many else self.bits

    def words(self, weight: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Data in 16-bit elements, scales in what one load takes."""
        data = weight.data.view(torch.int16)
        if weight.scale is None:
            return data, data
        return data, weight.scale.view(torch.int32 if self.bits == 4 else torch.int16)


def few_rows(call: Call, up: Few, down: Few) -> torch.Tensor:
    """Begin, up, down, combine. More than 1,024 choices are listed as for `many_rows`."""
    rows, chosen = call.ids_TK.shape
    experts, width, hidden = call.w1.shape
    device, choices = call.x_TC.device, rows * chosen
    sort = rows > _BLOCK
    counters = triton.next_power_of_2(width // call.block) if call.block else 1
    h_NF = torch.empty((choices, width), dtype=call.x_TC.dtype, device=device)
    y_NC = torch.empty((choices, hidden), dtype=call.x_TC.dtype, device=device)
    out_TC = torch.empty((rows, hidden), dtype=torch.float32, device=device)
    if choices > 1024:
        blocks = min(choices, experts + choices // _BLOCK)
        counter = torch.empty(blocks * counters, dtype=torch.int32, device=device)
        order, *lists = _listed(call, _BLOCK, blocks, counter, counters)
        rounded_TC = torch.empty_like(call.x_TC)
        _round(call, call.x_TC, rounded_TC, call.order(call.w1, many=False))
    else:
        blocks = min(choices, experts + choices // _BLOCK) if sort else choices
        parts = triton.cdiv(max(blocks, choices), _SLICE)
        sizes = [triton.cdiv(parts * _SLICE, 16) * 16] * 5 + [parts * _SLICE * counters]
        ints = torch.empty(sum(sizes), dtype=torch.int32, device=device)
        order, *lists, counter = ints.split(sizes)
        rounded_TC = torch.empty_like(call.x_TC)
        kernels.begin_few[(triton.cdiv(rows * hidden, 1024) + parts,)](
            call.x_TC,
            call.ids_TK,
            rounded_TC,
            counter,
            order,
            *lists,
            choices,
            rows,
            C=hidden,
            KC=chosen,
            E=experts,
            EP=triton.next_power_of_2(experts),
            CP=64 if choices <= 64 else 256 if choices <= 256 else 1024,
            BM=_BLOCK,
            BLOCK=call.block,
            ORDER=call.order(call.w1, many=False),
            SORT=sort,
            SLICE=_SLICE,
            COUNTERS=counters,
            PDL=ahead(),
            num_warps=4,
            num_stages=1,
        )
    (w1, s1), (w3, s3), (w2, s2) = (call.words(weight) for weight in (call.w1, call.w3, call.w2))
    block_n, block_k = call.w1.format.block or (1, 1)
    shared: dict[str, Any] = {
        "KC": chosen,
        "FORMAT": call.bits,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "ROUND": call.block,
        "ORDER": call.order(call.w2, many=False),
        "SORT": sort,
        "BN": 16,
        "BM": _BLOCK,
        "CP": 64,
        "COUNTERS": counters,
        "PDL": ahead(),
        "ASM": not interpreted(),
        "num_stages": 1,
        **options(),
    }
    kernels.few[(width // 16, blocks)](
        rounded_TC, w1, s1, w3, s3, call.weights_TK, call.ids_TK, *lists, counter, h_NF, choices, rows, call.limit,
        N=width, K=hidden, UP=True, NW=up.warps, STEPS=up.steps, AHEAD=up.ahead, TILED=call.w1.tiled,
        num_warps=up.warps, **shared,
    )  # fmt: skip
    kernels.few[(hidden // 16, blocks)](
        h_NF, w2, s2, w2, s2, call.weights_TK, call.ids_TK, *lists, counter, y_NC, choices, rows, call.limit,
        N=hidden, K=width, UP=False, NW=down.warps, STEPS=down.steps, AHEAD=down.ahead, TILED=call.w2.tiled,
        num_warps=down.warps, **shared,
    )  # fmt: skip
    _combine(call, y_NC, order, out_TC)
    return out_TC


def _combine(call: Call, y_NC: torch.Tensor, order: torch.Tensor, out_TC: torch.Tensor) -> None:
    rows, hidden = out_TC.shape
    kernels.combine[(rows, triton.cdiv(hidden, 1024))](
        y_NC, order, out_TC, C=hidden, KC=call.ids_TK.shape[1], SIZE=1024, PDL=ahead(), num_warps=4, **options()
    )


def many_rows(call: Call, up: Many, down: Many) -> torch.Tensor:
    """FP4 experts of thousands of rows: count, list, round, up, round, down, combine."""
    rows, chosen = call.ids_TK.shape
    experts, width, hidden = call.w1.shape
    device, choices = call.x_TC.device, rows * chosen
    assert up.tokens == down.tokens
    blocks = min(choices, experts + choices // up.tokens)
    order, *lists = _listed(call, up.tokens, blocks, call.ids_TK, 0)
    rounded_TC = torch.empty_like(call.x_TC)
    h_NF = torch.empty((choices, width), dtype=call.x_TC.dtype, device=device)
    y_NC = torch.empty((choices, hidden), dtype=call.x_TC.dtype, device=device)
    out_TC = torch.empty((rows, hidden), dtype=torch.float32, device=device)
    (w1, s1), (w3, s3), (w2, s2) = (call.words(weight) for weight in (call.w1, call.w3, call.w2))
    _round(call, call.x_TC, rounded_TC, call.order(call.w1, many=True))
    _many(call, up, rounded_TC, (w1, s1, w3, s3), lists, h_NF, blocks)
    again_NF = torch.empty_like(h_NF)
    _round(call, h_NF, again_NF, call.order(call.w2, many=True))
    _many(call, down, again_NF, (w2, s2), lists, y_NC, blocks)
    _combine(call, y_NC, order, out_TC)
    return out_TC


def _many(
    call: Call,
    tile: Many,
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    lists: list[torch.Tensor],
    out: torch.Tensor,
    blocks: int,
) -> None:
    """One product of `many`; four tensors of weights and scales are gate and up, two are down."""
    up = len(weights) == 4
    kernels.many[(triton.cdiv(out.shape[1], tile.rows // 2 if up else tile.rows), blocks)](
        x,
        *weights,
        *(() if up else weights),
        call.weights_TK,
        *lists,
        out,
        call.limit,
        N=out.shape[1],
        K=x.shape[1],
        KC=call.ids_TK.shape[1],
        UP=up,
        BM=tile.rows,
        BT=tile.tokens,
        NW=tile.warps,
        NS=tile.stages,
        U=tile.unrolled,
        TILED=(call.w1 if up else call.w2).tiled,
        ASM=not interpreted(),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **registers(tile.registers),
    )


def _listed(call: Call, block: int, blocks: int, counter: torch.Tensor, counters: int) -> tuple[torch.Tensor, ...]:
    """Order, list, and expert, begin and size of each block of at most `block` choices; `counter` is set to 0."""
    choices, chosen = call.ids_TK.numel(), call.ids_TK.shape[1]
    experts = call.w1.shape[0]
    parts, bins = triton.cdiv(choices, _PART), triton.next_power_of_2(experts)
    sizes = [parts * bins, *[parts * _PART] * 2, *[triton.cdiv(blocks, 64) * 64] * 3]
    counts, *lists = torch.empty(sum(sizes), dtype=torch.int32, device=call.ids_TK.device).split(sizes)
    kernels.count_choices[(parts,)](call.ids_TK, counts, choices, EP=bins, SIZE=_PART, num_warps=4)
    kernels.begin_many[(parts,)](
        call.ids_TK,
        counts,
        *lists,
        counter,
        choices,
        parts,
        blocks,
        KC=chosen,
        E=experts,
        EP=bins,
        PP=32,
        BT=block,
        SIZE=_PART,
        COUNTERS=counters,
        num_warps=8,
        num_stages=1,
    )
    return tuple(lists)


def _round(call: Call, x: torch.Tensor, out: torch.Tensor, order: int) -> None:
    values = x.numel()
    round_rows[(triton.cdiv(values, 4096),)](
        x, out, values, BLOCK=call.block, SIZE=4096, ORDER=order, PDL=False, num_warps=8
    )
