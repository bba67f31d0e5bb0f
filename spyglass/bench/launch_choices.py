"""Calls of Triton ops whose launches can be chosen: which launches there are, and inputs to try them on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from spyglass.bench.shapes import OpCall
from spyglass.ops import gpu, tuned
from spyglass.ops.experts_grouped import triton as experts
from spyglass.ops.index_topk import triton as index
from spyglass.ops.linear_block import triton as linear
from spyglass.ops.linear_grouped import triton as grouped
from spyglass.ops.rms_norm import triton as rms_norm
from spyglass.ops.row_finish import triton as row_finish
from spyglass.ops.sparse_attention import triton as attention
from spyglass.ops.swiglu import triton as swiglu
from spyglass.quant.packed import Packed, empty_packed

_ROTATED = 256 << 20  # bytes that no cache holds
_MOST_SETS = 32
_SHORT = (experts.Few(warps=1, steps=2), experts.Few(warps=1, steps=1))
_NEAR = 6  # numbers of programs nearest to that of processors are tried
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A call whose launch can be chosen. `table` and `shape` say where launch code looks for it, `rows` which bucket.

    The first of `launches` is None: what launch code chooses today. `inputs(device)` gives sets of inputs to take turns
    with, so that weights come from memory; `run(launch, set)` is the call. Results of two launches may differ by
    `tolerance`, relative to their size.
    """

    table: str
    shape: str
    rows: int
    launches: tuple[Any, ...]
    inputs: Callable[[torch.device], Sequence[Inputs]]
    run: Callable[[Any, Inputs], torch.Tensor]
    tolerance: float


def works_of(calls: Sequence[OpCall]) -> list[Work]:
    """One for each table, shape and bucket that these calls have, without what has no choice."""
    found: dict[tuple[str, str, int], Work] = {}
    for call in calls:
        work = _MAKERS[call.op](call) if call.op in _MAKERS else None
        if work is not None and len(work.launches) > 1:
            found.setdefault((work.table, work.shape, work.rows), work)
    return list(found.values())


def _linear(call: OpCall) -> Work | None:
    x, weight, *_ = call.args
    groups = x.shape[1] if call.op == "linear_grouped" else 1
    rows = x.numel() // (weight.shape[1] * groups)
    rounding = call.options["rounding"] if "rounding" in call.options else None
    if not linear.suits(x, weight, rounding, rows, groups):
        return None

    def inputs(device: torch.device) -> list[Inputs]:
        size = weight.data.nbytes
        return [((_drawn(x, device), _weight(weight, device)), call.options) for _ in range(_sets(size, device))]

    def run(launch: Any, given: Inputs) -> torch.Tensor:
        args, options = given
        if call.op == "linear_grouped":
            return grouped.linear_grouped(*args, **options, launch=launch)
        return linear.linear_block(*args, **options, launch=launch)

    return Work(
        table="linear_block",
        shape=tuned.key(**linear.shape_key(weight, groups)),
        rows=tuned.bucket(rows),
        launches=(None, *_linear_launches(rows, weight, groups)),
        inputs=inputs,
        run=run,
        tolerance=4e-3,
    )


def _linear_launches(rows: int, weight: Packed, groups: int) -> Iterator[Any]:
    out, inner = weight.shape
    step, out = 512 // linear.BITS[weight.format.name], out // groups
    if rows <= linear.FEW:
        for warps, steps, ahead in product((1, 2, 4, 8), (4, 2), (True, False)):
            for side in (16, 32) if rows > 8 else (16,):
                if inner % (warps * steps * step) == 0 == out % side and (steps == 4 or warps > 2):
                    yield linear.Few(warps=warps, steps=steps, ahead=ahead, rows=side)
    if weight.format.name != "fp8" or rows <= 8:
        return
    tiles: tuple[tuple[int, int, int, int, int], ...] = ((64, 32, 4, 4, 1), (64, 32, 4, 3, 2))
    if rows > linear.FEW:
        tiles = (
            *tiles,
            (32, 64, 2, 4, 1),
            (32, 128, 2, 4, 1),
            (64, 64, 4, 4, 1),
            (64, 64, 4, 3, 2),
            (64, 128, 4, 4, 1),
        )
        tiles = (*tiles, (64, 128, 4, 3, 2), (128, 64, 8, 4, 1), (128, 128, 8, 3, 1), (128, 128, 8, 2, 2))
    if rows >= 512:
        tiles = (*tiles[4:], (128, 256, 8, 2, 2))
        yield linear.Expanded()
    for side, tokens, warps, stages, unrolled in tiles:
        if out % side == 0:
            yield linear.Many(rows=side, tokens=tokens, warps=warps, stages=stages, unrolled=unrolled)


def _experts(call: OpCall) -> Work | None:
    x_TC, ids_TK, _, w1, w3, w2 = call.args
    (rows, chosen), stacks = ids_TK.shape, (w1, w3, w2)
    if not experts.suits(x_TC, ids_TK, *stacks, call.options["rounding"]):
        return None

    def inputs(device: torch.device) -> list[Inputs]:
        held = [_weight(stack, device) for stack in stacks]
        sets = 1 if device.type == "meta" else max(1, min(_MOST_SETS, w1.shape[0] // (rows * chosen)))
        return [
            ((_drawn(x_TC, device), ids, torch.rand(ids.shape, device=device), *held), call.options)
            for ids in _choices(rows, chosen, w1.shape[0], max(2, sets), device)
        ]

    return Work(
        table="experts_grouped",
        shape=tuned.key(**experts.shape_key(chosen, w1)),
        rows=tuned.bucket(rows),
        launches=(None, *_experts_launches(rows, chosen, w1)),
        inputs=inputs,
        run=lambda launch, given: experts.experts_grouped(*given[0], **given[1], launches=launch),
        tolerance=4e-3,
    )


def _experts_launches(rows: int, chosen: int, w1: Packed) -> Iterator[experts.Tuning]:
    _, width, hidden = w1.shape
    if rows <= 1023:
        ends: list[list[experts.Few]] = [[], []]
        for end, inner in zip(ends, (hidden, width), strict=True):
            for warps, steps, ahead in product((1, 2, 4, 8) if rows <= 32 else (1, 2), (4, 2), (False, True)):
                if inner % (warps * steps * 128) == 0 and (steps == 4 or (warps > 2 and not ahead)):
                    end.append(experts.Few(warps=warps, steps=steps, ahead=ahead))
            if not end:  # sums that 512 does not divide
                end.append(next(few for few in _SHORT if inner % (few.steps * 128) == 0))
        yield from (experts.Tuning(up=up, down=down) for up, down in product(*ends))
    if rows > 128 and w1.format.name == "fp4":
        shapes: tuple[tuple[int, int, int, int, int, int | None], ...]
        shapes = ((128, 64, 8, 3, 1, None), (128, 64, 8, 2, 2, None), (64, 64, 4, 3, 1, None), (128, 128, 8, 2, 1, 128))
        for side, tokens, warps, stages, unrolled, registers in shapes:
            tile = experts.Many(
                rows=side, tokens=tokens, warps=warps, stages=stages, unrolled=unrolled, registers=registers
            )
            yield experts.Tuning(up=tile, down=tile)


def _choices(rows: int, chosen: int, total: int, sets: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Experts of each row, other ones in every set as long as there are some."""
    for number in range(sets):
        if rows == 1:
            ids = torch.arange(number * chosen, (number + 1) * chosen).view(1, chosen) % total
        else:
            ids = torch.rand(rows, total).topk(chosen, 1).indices
        yield ids.int().to(device)


def _attention(call: OpCall) -> Work | None:
    q_THD, pages = call.args[:2]
    rows, keys = len(q_THD), call.options["window_width"] + call.options["pool_width"]
    if not attention.suits(q_THD, pages, call.options["pool_NBD"]):
        return None

    def inputs(device: torch.device) -> list[Inputs]:
        if device.type == "meta":
            return [(call.args, call.options)]
        given = call.options
        count = max(64, min(2048, _ROTATED // (pages[0].nbytes + 1)))
        held = {name: _pages(call.args[1] if name == "window" else given["pool_NBD"], count, device)
                for name in ("window", "pool")}  # fmt: skip
        return [_attended(call, held, device) for _ in range(min(_MOST_SETS, max(2, 256 // rows)))]

    return Work(
        table="sparse_attention",
        shape=tuned.key(**attention.shape_key(q_THD, keys)),
        rows=tuned.bucket(rows),
        launches=(None, *_attention_launches(rows, keys, q_THD)),
        inputs=inputs,
        run=lambda launch, given: attention.sparse_attention(*given[0], **given[1], launch=launch),
        tolerance=2e-2,
    )


def _attended(call: OpCall, held: dict[str, torch.Tensor | None], device: torch.device) -> Inputs:
    """Rows at the end of sequences, or those of one prompt, all of whose keys are there."""
    q_THD, _, table, *_, sink_H = call.args
    given, rows = call.options, len(call.args[0])
    window, pool = held["window"], held["pool"]
    assert window is not None
    seq = torch.arange(rows, device=device, dtype=torch.int32) % len(table)
    last = torch.arange(rows, device=device, dtype=torch.int32) if len(table) == 1 else seq * 0 + 32 * table.shape[1]
    options = dict(given)
    if pool is not None:
        room = given["pool_table_SP"].shape[1] * pool.shape[1]
        options |= {"pool_NBD": pool, "pool_table_SP": _table(given["pool_table_SP"], pool)}
        options["visible_T"] = seq * 0 + min(room, given["pool_width"])
        if given["topk_indices_TX"] is not None:
            width = given["topk_indices_TX"].shape[1]
            order = torch.rand(rows, min(room, 2 * width), device=device).argsort(1)[:, :width].sort(1).values
            options |= {"topk_indices_TX": order.int(), "visible_T": seq * 0 + room}
    options["turn"] = None if given["turn"] is None else replace(
        given["turn"], cos_TR=_drawn(given["turn"].cos_TR, device), sin_TR=_drawn(given["turn"].sin_TR, device)
    )  # fmt: skip
    lo = (last - given["window_width"] + 1).clamp(min=0)
    args = (_drawn(q_THD, device), window, _table(table, window), seq, lo, last, _drawn(sink_H, device))
    return args, options


def _attention_launches(rows: int, keys: int, q_THD: torch.Tensor) -> Iterator[attention.Launch]:
    heads, dim = q_THD.shape[1:]
    processors, tried = gpu.processors(q_THD.device), list[tuple[float, attention.Launch]]()
    streams = gpu.generation() == 90 and q_THD.dtype == torch.bfloat16 and (heads, dim) == (64, 512)
    tiles: list[tuple[int, int, int, int, bool]]
    tiles = [(16, 32, 4, 1, False), (16, 64, 4, 1, False), (32, 64, 8, 1, False), (64, 64, 8, 1, False)]
    if streams and rows > 2:
        tiles.append((64, 64, 8, 2, True))
    for side, width, warps, stages, stream in tiles:
        for splits in (20, 16, 10, 8, 4, 2, 1):
            programs = rows * -(-heads // side) * splits
            if splits <= max(1, -(-keys // width)) and side <= max(16, heads) and (rows < 1024 or splits == 1):
                launch = attention.Launch(
                    heads=side, keys=width, splits=splits, warps=warps, stages=stages, stream=stream
                )
                tried.append((abs(math.log(programs / processors)), launch))
    yield from [launch for _, launch in sorted(tried, key=lambda one: one[0])[: 2 * _NEAR]]


def _index(call: OpCall) -> Work | None:
    q_TNI, _, keys_NBI, table, _, _ = call.args
    rows, listed = len(q_TNI), call.options["blocks_TY"] is not None
    if listed or not index.suits(q_TNI, keys_NBI, call.options["max_visible"]):
        return None

    def inputs(device: torch.device) -> list[Inputs]:
        if device.type == "meta":
            return [(call.args, call.options)]
        pages = _pages(keys_NBI, 2048, device)
        assert pages is not None
        sets = []
        for _ in range(min(_MOST_SETS, max(2, 64 // rows))):
            seq = torch.arange(rows, device=device, dtype=torch.int32) % len(table)
            visible = torch.full((rows,), call.options["max_visible"], device=device, dtype=torch.int32)
            weights = torch.rand(call.args[1].shape, device=device).to(call.args[1].dtype)
            sets.append(((_drawn(q_TNI, device), weights, pages, _table(table, pages), seq, visible), call.options))
        return sets

    return Work(
        table="index_topk",
        shape=tuned.key(**index.shape_key(q_TNI, listed)),
        rows=tuned.bucket(rows),
        launches=(None, *_scorings(rows)),
        inputs=inputs,
        run=lambda launch, given: index.index_topk(*given[0], **given[1], how=launch),
        tolerance=0.05,  # of places of entries whose scores are equal but for the order of a sum
    )


def _scorings(rows: int) -> Iterator[index.Scoring]:
    for at_once, keys, programs, warps in (
        *((1, 64, 4, 4), (1, 64, 8, 4), (1, 128, 4, 4), (1, 128, 2, 8), (1, 32, 8, 4), (2, 128, 4, 8), (2, 64, 4, 4)),
        *((4, 128, 4, 8),),
    ):
        if at_once == 1 or rows > 8:
            yield index.Scoring(rows=at_once, keys=keys, programs=programs, warps=warps, stages=2)


def _row_wise(call: OpCall) -> Work | None:
    """Ops whose programs take some rows, heads or channels each."""
    x, options = call.args[0], call.options
    function: Callable[..., torch.Tensor]
    if call.op == "rms_norm":
        shape, function = rms_norm.shape_key(x, options["quant"]), rms_norm.rms_norm
        sizes = [size for size in (1, 2, 4, 8) if size * x.shape[-1] <= 8192]
    elif call.op == "row_finish":
        shape, function = row_finish.shape_key(x, options["hadamard"], options["quant"]), row_finish.row_finish
        heads, dim = (1, x.shape[-1]) if x.dim() == 2 else x.shape[1:]
        sizes = [size for size in (1, 2, 4, 8, 16, 32) if size <= max(1, heads) and size * dim <= 8192]
    else:
        shape, function, sizes = {"width": x.shape[-1]}, swiglu.swiglu, [256, 512, 1024, 2048]

    def inputs(device: torch.device) -> list[Inputs]:
        drawn = [_drawn(arg, device) if isinstance(arg, torch.Tensor) else arg for arg in call.args]
        given = dict(options)
        if options.get("weight_D") is not None:
            given["weight_D"] = _drawn(options["weight_D"], device)
        if options.get("pages_NBD") is not None:
            pages = _pages(options["pages_NBD"], max(8, -(-len(x) // options["pages_NBD"].shape[1])), device)
            given |= {"pages_NBD": pages, "write_T": torch.arange(len(x), device=device)}
        return [(tuple(drawn), given)]

    kinds = [tuned.RowWise(at_once=size, warps=warps) for size in sizes for warps in (1, 2, 4, 8)]
    return Work(
        table=call.op,
        shape=tuned.key(**shape),
        rows=tuned.bucket(len(x)),
        launches=(None, *kinds),
        inputs=inputs,
        run=lambda launch, given: function(*given[0], **given[1], launch=launch),
        tolerance=2e-2,  # a last bit may decide where a value is rounded to
    )


_MAKERS: dict[str, Callable[[OpCall], Work | None]] = {
    "linear_block": _linear,
    "linear_grouped": _linear,
    "experts_grouped": _experts,
    "sparse_attention": _attention,
    "index_topk": _index,
    "rms_norm": _row_wise,
    "row_finish": _row_wise,
    "swiglu": _row_wise,
}


def _drawn(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Random numbers of a shape and dtype."""
    return torch.randn(like.shape, device=device).to(like.dtype)


def _weight(like: Packed, device: torch.device) -> Packed:
    """A weight of random codes that are numbers, with scales of neighbouring powers of two."""
    weight = replace(empty_packed(like.format, like.shape, device), tiled=like.tiled)
    if device.type == "meta":
        return weight
    if weight.format.name == "bf16":
        weight.data.normal_(std=like.shape[-1] ** -0.5)
        return weight
    codes = weight.data.view(torch.uint8)
    codes.random_(0, 256)
    if weight.format.name == "fp8":
        codes[(codes & 127) == 127] = 0  # NaN
    assert weight.scale is not None
    weight.scale.random_(117, 124)
    return weight


def _sets(nbytes: int, device: torch.device) -> int:
    return 1 if device.type == "meta" else max(2, min(_MOST_SETS, -(-_ROTATED // nbytes)))


def _pages(like: torch.Tensor | None, count: int, device: torch.device) -> torch.Tensor | None:
    """As many pages of random rows as no cache holds."""
    return None if like is None else torch.randn(count, *like.shape[1:], device=device).to(like.dtype)


def _table(like: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """A page table of random pages."""
    return torch.randint(0, len(pages), like.shape, device=pages.device, dtype=torch.int32)
