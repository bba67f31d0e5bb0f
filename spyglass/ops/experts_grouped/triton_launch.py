"""Workspaces and launches of `triton_kernel.py`; importing it needs Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from spyglass.ops.experts_grouped import triton_adapters
from spyglass.ops.experts_grouped import triton_kernel as kernels
from spyglass.ops.experts_grouped.adapters import ExpertAdapters, ExpertRanks
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
    """Checked arguments of the op; `block` of the rounding, 0 without; `bits` of a weight.

    `adapter_T` wherever there are `adapters`.
    """

    x_TC: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    w1: Packed
    w3: Packed
    w2: Packed
    limit: float
    block: int
    bits: int
    adapter_T: torch.Tensor | None = None
    adapters: ExpertAdapters | None = None

    def order(self, weight: Packed, many: bool) -> int:
        """In which order a product with `weight` reads its input (see `round_rows`)."""
        return (41 if many else 0) if weight.tiled else 40 if many else self.bits

    def words(self, weight: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Data in 16-bit elements, scales in what one load takes."""
        data = weight.data.view(torch.int16)
        if weight.scale is None:
            return data, data
        return data, weight.scale.view(torch.int32 if self.bits == 4 else torch.int16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Choices by expert as products take them: at most `size` of one in each of `count` blocks.

    `lists` as `begin_few` writes them; without `sort` block c is choice c and all of its expert.
    """

    lists: list[torch.Tensor]
    count: int
    size: int
    sort: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """Adapters of one end of a call: `ranks` of its first and second matrix, and what rank rows made of their input.

    `u` fp32 [matrix, choice, room].
    """

    call: Call
    ranks: tuple[ExpertRanks | None, ...]
    u: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What `expand` reads: adapters, u, and for both matrices rank rows and where they begin."""
        call, held = self.call, [ranks for ranks in self.ranks if ranks is not None]
        if not held:
            return (call.ids_TK, call.ids_TK, self.u, self.u, call.ids_TK, self.u, call.ids_TK)
        assert call.adapter_T is not None and call.adapters is not None
        first, *others = [held[0] if ranks is None else ranks for ranks in self.ranks]
        second = others[0] if others else first
        return (
            *(call.adapter_T, call.adapters.adapter_A, self.u),
            *(first.b_RO, first.start_AE1, second.b_RO, second.start_AE1),
        )

    @property
    def numbers(self) -> tuple[int, int]:
        """Adapters that are attached, and rank rows that u has room for."""
        return _num_slots(self.call), self.u.shape[2]

    @property
    def constants(self) -> dict[str, Any]:
        """What a product is compiled for."""
        given = [ranks is not None for ranks in (*self.ranks, None)[:2]]
        return {"E": self.call.w1.shape[0], "A": given[0], "B": given[1], "SP": _slots_padded(self.call)}


def _num_slots(call: Call) -> int:
    return 0 if call.adapters is None else len(call.adapters.adapter_A)


def _slots_padded(call: Call) -> int:
    return max(16, triton.next_power_of_2(_num_slots(call))) if call.adapters is not None else 1


def _shrink(call: Call, x: torch.Tensor, matrices: tuple[str, ...], blocks: Blocks) -> Shrunk:
    """One launch for all matrices of an end that have adapters, none without."""
    held = {} if call.adapters is None else call.adapters.matrices
    ranks = tuple([held[name] if name in held and max(map(max, held[name].ranks_AE)) else None for name in matrices])
    present = [each for each in ranks if each is not None]
    room = max([0, *(n for each in present for ranks_E in each.ranks_AE for n in ranks_E)])
    choices = call.ids_TK.numel()
    u = torch.empty((len(matrices), choices if present else 0, room), dtype=torch.float32, device=x.device)
    if present:
        assert call.adapter_T is not None and call.adapters is not None
        tall = blocks.size > 16
        triton_adapters.shrink[(triton.cdiv(room, 16), blocks.count, len(present))](
            x, call.ids_TK, *blocks.lists, call.adapter_T, call.adapters.adapter_A,
            *(tensor for each in (present[0], present[-1]) for tensor in (each.a_RI, each.scale_R, each.start_AE1)),
            u[ranks.index(present[0]) :], choices, call.ids_TK.shape[0], *(_num_slots(call), room),
            K=x.shape[1], E=call.w1.shape[0], KC=call.ids_TK.shape[1], BY_ROW=len(matrices) == 2, SORT=blocks.sort,
            BT=blocks.size if tall else 16, BR=16, BK=128 if tall or present[0].a_RI.dtype == torch.float32 else 256,
            NS=3, SP=_slots_padded(call), CP=64, PDL=ahead(), num_warps=4, num_stages=3, **options(),
        )  # fmt: skip
    return Shrunk(call=call, ranks=ranks, u=u)


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
            call.x_TC, call.ids_TK, rounded_TC, counter, order, *lists, choices, rows,
            C=hidden, KC=chosen, E=experts, EP=triton.next_power_of_2(experts),
            CP=64 if choices <= 64 else 256 if choices <= 256 else 1024, BM=_BLOCK, BLOCK=call.block,
            ORDER=call.order(call.w1, many=False), SORT=sort, SLICE=_SLICE, COUNTERS=counters, PDL=ahead(), num_warps=4,
            num_stages=1,
        )  # fmt: skip
    given = Blocks(lists=lists, count=blocks, size=_BLOCK, sort=sort)
    above = _shrink(call, call.x_TC, ("w1", "w3"), given)
    keeps = call.adapters is not None and "w2" in call.adapters.matrices
    plain_NF = torch.empty_like(h_NF) if keeps else h_NF
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
        rounded_TC, w1, s1, w3, s3, call.weights_TK, call.ids_TK, *lists, counter, h_NF,
        *above.tensors, plain_NF, choices, rows, *above.numbers, call.limit, **above.constants, KEEP=keeps,
        N=width, K=hidden, UP=True, NW=up.warps, STEPS=up.steps, AHEAD=up.ahead, TILED=call.w1.tiled,
        num_warps=up.warps, **shared,
    )  # fmt: skip
    below = _shrink(call, plain_NF, ("w2",), given)
    kernels.few[(hidden // 16, blocks)](
        h_NF, w2, s2, w2, s2, call.weights_TK, call.ids_TK, *lists, counter, y_NC,
        *below.tensors, y_NC, choices, rows, *below.numbers, call.limit, **below.constants, KEEP=False,
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
    given = Blocks(lists=lists, count=blocks, size=up.tokens, sort=True)
    above = _shrink(call, call.x_TC, ("w1", "w3"), given)
    _many(call, up, rounded_TC, (w1, s1, w3, s3), above, given, h_NF)
    again_NF = torch.empty_like(h_NF)
    _round(call, h_NF, again_NF, call.order(call.w2, many=True))
    below = _shrink(call, h_NF, ("w2",), given)
    _many(call, down, again_NF, (w2, s2), below, given, y_NC)
    _combine(call, y_NC, order, out_TC)
    return out_TC


def _many(
    call: Call,
    tile: Many,
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    shrunk: Shrunk,
    blocks: Blocks,
    out: torch.Tensor,
) -> None:
    """One product of `many`; four tensors of weights and scales are gate and up, two are down."""
    up = len(weights) == 4
    kernels.many[(triton.cdiv(out.shape[1], tile.rows // 2 if up else tile.rows), blocks.count)](
        x, *weights, *(() if up else weights), call.weights_TK, *blocks.lists, out, *shrunk.tensors,
        call.ids_TK.numel(), *shrunk.numbers, call.limit,
        **shrunk.constants, N=out.shape[1], K=x.shape[1], KC=call.ids_TK.shape[1], UP=up, BM=tile.rows, BT=tile.tokens,
        NW=tile.warps, NS=tile.stages, U=tile.unrolled, TILED=(call.w1 if up else call.w2).tiled, ASM=not interpreted(),
        num_warps=tile.warps, num_stages=tile.stages, **registers(tile.registers),
    )  # fmt: skip


def _listed(call: Call, block: int, blocks: int, counter: torch.Tensor, counters: int) -> tuple[torch.Tensor, ...]:
    """Order, list, and expert, begin and size of each block of at most `block` choices; `counter` is set to 0."""
    choices, chosen = call.ids_TK.numel(), call.ids_TK.shape[1]
    experts = call.w1.shape[0]
    parts, bins = triton.cdiv(choices, _PART), triton.next_power_of_2(experts)
    sizes = [parts * bins, *[parts * _PART] * 2, *[triton.cdiv(blocks, 64) * 64] * 3]
    counts, *lists = torch.empty(sum(sizes), dtype=torch.int32, device=call.ids_TK.device).split(sizes)
    kernels.count_choices[(parts,)](call.ids_TK, counts, choices, EP=bins, SIZE=_PART, num_warps=4)
    kernels.begin_many[(parts,)](
        call.ids_TK, counts, *lists, counter, choices, parts, blocks,
        KC=chosen, E=experts, EP=bins, PP=32, BT=block, SIZE=_PART, COUNTERS=counters, num_warps=8, num_stages=1,
    )  # fmt: skip
    return tuple(lists)


def _round(call: Call, x: torch.Tensor, out: torch.Tensor, order: int) -> None:
    values = x.numel()
    round_rows[(triton.cdiv(values, 4096),)](
        x, out, values, BLOCK=call.block, SIZE=4096, ORDER=order, PDL=False, num_warps=8
    )
