"""Calls of ops whose kernels have a backward of their own, with the gradients of the reference beside them.

To be run where kernels are interpreted, in fp32: then a packed weight is fp32 once it is decoded, and so are rank rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

import spyglass.ops.experts_grouped.training as experts
import spyglass.ops.linear_block.triton_training as products
import spyglass.ops.sparse_attention.blocks as blocks
from spyglass.ops.launches import pretended
from spyglass.ops.lora_delta.rank_rows import RankRows
from spyglass.ops.sparse_attention.reference import Turn
from spyglass.quant.codec import decode, encode
from spyglass.quant.formats import F32, FP4, FakeQuant, Format, fp8
from spyglass.quant.packed import Packed
from tests.ops.call import Source
from tests.ops.paged_cases import sparse_attention
from tests.ops.test_training_ops import as_adapters, expert_call, leaves_of_pairs

FORMATS: dict[str, Format] = {"f32": F32, "fp4": FP4, "fp8 32": fp8((32, 32)), "fp8 128": fp8((128, 128))}
Op = Callable[..., Any]
Pair = tuple[str, torch.Tensor, torch.Tensor]  # what it is, as found and as it should be
ROWS = 37


def op(name: str, which: str) -> Op:
    """One implementation of an op."""
    found: Op = getattr(importlib.import_module(f"spyglass.ops.{name}.{which}"), name)
    return found


def both(name: str, ours: Op, theirs: Op, leaves: Sequence[torch.Tensor], *, rounds: bool = False) -> list[Pair]:
    """Outputs and gradients; those of a call that `rounds` are not the identity's in the reference, and left out."""
    found: list[list[torch.Tensor]] = []
    for run in (ours, theirs):
        fresh = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        with pretended(90):
            out = run(*fresh)
            outs = out if isinstance(out, tuple) else (out,)
            source = torch.Generator().manual_seed(5)
            weights = [torch.randn(one.shape, generator=source) for one in outs]
            grads = () if rounds else torch.autograd.grad(outs, fresh, weights, materialize_grads=True)
        found.append([*outs, *grads])
    return [(f"{name}, result {n}", a.detach(), b.detach()) for n, (a, b) in enumerate(zip(*found, strict=True))]


def maps(parts: int) -> list[Pair]:
    """Linear maps beside rank rows, of which one row has none; fp32 numbers in one part, or in several as for bf16."""
    found, source = [], Source(torch.float32)
    with _cut(parts):
        for name, format in FORMATS.items():
            weight = encode(source.normal(128, 256) * 0.1, format)
            plain = Packed(F32, decode(weight, torch.float32), None, weight.shape)
            adapter_T = torch.ones(ROWS, dtype=torch.int32).index_fill(0, torch.tensor([4]), 0)
            for rank, bias in ((3, None),) if name == "fp4" else ((16, source.normal(128)),):
                options: dict[str, Any] = {"adapter_T": adapter_T, "adapter_R": torch.ones(rank, dtype=torch.int32)}
                options["scale_R"] = source.uniform(rank)
                leaves = [source.normal(ROWS, 256), source.normal(rank, 256) * 0.1, source.normal(rank, 128) * 0.1]
                for rounding in (None, FakeQuant(element="e4m3", block=128)):
                    run = _map(options, rounding, bias)
                    ours, theirs = (
                        run(op("linear_block", w), p) for w, p in (("training", weight), ("reference", plain))
                    )
                    found += both(f"{name} of rank {rank}", ours, theirs, leaves, rounds=rounding is not None)
                grouped = _grouped(options)
                ours, theirs = (
                    grouped(op("linear_grouped", w), p) for w, p in (("training", weight), ("reference", plain))
                )
                found += both(f"{name} in groups", ours, theirs, [source.normal(ROWS, 2, 256), *leaves[1:]])
    return found


def _map(options: dict[str, Any], rounding: FakeQuant | None, bias: torch.Tensor | None) -> Callable[[Op, Packed], Op]:
    def bound(op: Op, weight: Packed) -> Op:
        def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
            rows: Any = RankRows(x_TGI=x[:, None], a_RI=a, b_RGO=b[:, None], **options)
            if op.__module__.endswith("reference"):
                rows = rows.multiplied()[:, 0]
            return op(x, weight, rounding=rounding, addend_TO=rows, bias_O=bias)

        return run

    return bound


def _grouped(options: dict[str, Any]) -> Callable[[Op, Packed], Op]:
    def bound(op: Op, weight: Packed) -> Op:
        def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
            rows: Any = RankRows(x_TGI=x, a_RI=a, b_RGO=b.unflatten(1, (2, -1)), **options)
            return op(x, weight, addend_TGO=rows.multiplied() if op.__module__.endswith("reference") else rows)

        return run

    return bound


class _cut:
    """Meanwhile fp32 numbers have so many parts in a product as matrix units would make of them: 1, or 3 and 6."""

    def __init__(self, parts: int) -> None:
        self._parts, self._before = parts, products.parts

    def __enter__(self) -> None:
        if self._parts > 1:
            products.parts = lambda kind: 3 if kind == products.EACH else 6

    def __exit__(self, *_: object) -> None:
        products.parts = self._before


def many_experts(parts: int) -> list[Pair]:
    """Routed experts, two in a chunk, with pairs beside all matrices or one."""
    found: list[Pair] = []
    experts.experts_at_once = lambda *_: 2
    with _cut(parts):
        for name, only in (("f32", None), ("fp4", None), ("fp4", "w1"), ("fp4", "w3"), ("fp8 32", "w2")):
            x, ids, weights, stacks = expert_call(FORMATS[name])
            plain = [Packed(F32, decode(stack, torch.float32), None, stack.shape) for stack in stacks]
            leaves = [x, weights, *leaves_of_pairs(Source(torch.float32))]
            for rounding in (None, FakeQuant(element="e4m3", block=32)) if only is None else (None,):
                ours, theirs = (
                    _experts(op("experts_grouped", which), ids, those, rounding, only)
                    for which, those in (("training", stacks), ("reference", plain))
                )
                found += both(f"{name} {only}", ours, theirs, leaves, rounds=rounding is not None)
    return found


def _experts(op: Op, ids: torch.Tensor, stacks: list[Packed], rounding: FakeQuant | None, only: str | None) -> Op:
    return lambda x, weights, *leaves: op(
        x, ids, weights, *stacks, limit=0.8, rounding=rounding, **as_adapters(leaves, only=only)
    )


def attention(parts: int) -> list[Pair]:
    """Windows, pools and top-k indices; sequences alone and in one block; q as it is, and normed and turned."""
    del parts
    found: list[Pair] = []
    for limit, logits in ((0, 150), (1 << 27, 1 << 25)):
        blocks.block_limit, blocks.LOGITS_AT_ONCE = (lambda _, limit=limit: limit), logits  # type: ignore[misc]
        for pool, topk in ((False, ""), (True, ""), (True, "chosen")):
            call = sparse_attention(Source(torch.float32, padding=False), pool=pool, topk=topk)
            q, window, *places, sink = call.args
            options, source = dict(call.options), Source(torch.float32)
            leaves = [q, window, sink, *([options.pop("pool_NBD")] if pool else [])]
            angle = source.normal(len(q), 4)
            if limit:
                options["turn"] = Turn(cos_TR=angle.cos(), sin_TR=angle.sin(), eps=1e-6)
            ours, theirs = (_attend(op("sparse_attention", w), places, options) for w in ("training", "reference"))
            found += both(f"attention {topk or pool} {limit}", ours, theirs, leaves)
    return found


def _attend(op: Op, places: list[torch.Tensor], options: dict[str, Any]) -> Op:
    def run(q: torch.Tensor, window: torch.Tensor, sink: torch.Tensor, *pool: torch.Tensor) -> Any:
        return op(q, window, *places, sink, **options, **({"pool_NBD": pool[0]} if pool else {}))

    return run


def streams(parts: int) -> list[Pair]:
    """Hyper-connections, with a pre of their own and with one that is given."""
    del parts
    source, width = Source(torch.float32), 160
    weights = [source.normal(24, 4 * width) * 0.05, source.uniform(3) + 0.5, source.normal(24) * 0.3]
    weights.append(source.uniform(width) + 0.5)
    constants = {"norm_eps": 1e-6, "hc_eps": 1e-6, "rounds": 20, "eps": 1e-6}
    z, x, pre = source.normal(ROWS, width), source.normal(ROWS, 4, width), source.uniform(ROWS, 4)
    post, comb = source.uniform(ROWS, 4), source.uniform(ROWS, 4, 4)

    def read(op: Op) -> Op:
        return lambda x, pre: (*op(x, *weights, **constants), *op(x, *weights, pre_TM=pre, **constants))

    def write_read(op: Op) -> Op:
        return lambda z, shared, x, post, comb, pre: (
            *op(z, shared, x, post, comb, *weights, **constants),
            *op(z, None, x, post, comb, *weights, pre_TM=pre, **constants),
        )

    cases = (
        ("hyper_read", read, [x, pre]),
        ("hyper_write_read", write_read, [z, z.flip(0), x, post, comb, pre]),
        ("hyper_expand", lambda op: op, [z, x, post, comb]),
    )
    return [pair for name, bound, leaves in cases for pair in _each(name, bound, leaves)]


def rows(parts: int) -> list[Pair]:
    """Norms, rotations and gates; widths that are no powers of two where a kernel takes them."""
    del parts
    source = Source(torch.float32)
    weight, wide = source.uniform(96), source.uniform(64)
    (cos, sin), half = (source.normal(ROWS, 8), source.normal(ROWS, 8)), source.normal(ROWS, 32)
    x, heads = source.normal(ROWS, 96), source.normal(ROWS, 5, 64)
    cases: list[tuple[str, Callable[[Op], Op], list[torch.Tensor]]] = [
        ("rms_norm", lambda op: lambda x: op(x, weight, eps=1e-6), [x]),
        ("rms_norm", lambda op: lambda x: op(x, None, eps=1e-6, stepwise=True), [heads]),
        ("row_finish", lambda op: lambda x: op(x, cos, sin, eps=1e-6, stepwise=True), [heads]),
        ("row_finish", lambda op: lambda x: op(x, cos, sin, weight_D=wide, eps=1e-6), [heads[:, 0]]),
        ("row_finish", lambda op: lambda x: op(x, cos, sin, hadamard=True), [heads]),
        ("rope_half", lambda op: lambda x: op(x, half.cos(), half.sin()), [heads]),
        ("silu_mul", lambda op: op, [x]),
        ("swiglu", lambda op: lambda gate, up: op(gate, up, limit=1.0), [2 * x, 2 * x.flip(0)]),
    ]
    return [pair for name, bound, leaves in cases for pair in _each(name, bound, leaves)]


def _each(name: str, bound: Callable[[Op], Op], leaves: list[torch.Tensor]) -> list[Pair]:
    return both(name, bound(op(name, "training")), bound(op(name, "reference")), leaves)


CASES: dict[str, Callable[[int], list[Pair]]] = {
    "maps": maps,
    "experts": many_experts,
    "attention": attention,
    "streams": streams,
    "rows": rows,
}


def compared(case: str, parts: int) -> list[Pair]:
    """All pairs of a case, in a process where kernels are interpreted."""
    return CASES[case](parts)


def cut_numbers() -> tuple[torch.Tensor, ...]:
    """fp32 numbers, their three parts, and products of 16 of them by six products of parts, beside fp64."""
    left, right = torch.randn(1, 50, 16) * 20, torch.randn(1, 30, 16)
    each, lefts, rights = (torch.empty(1, n, 16, parts) for n, parts in ((50, 3), (50, 6), (30, 6)))
    with pretended(90), _cut(3):
        products.place_parts(left, each, products.EACH)
        products.place_parts(left, lefts, products.LEFT)
        products.place_parts(right, rights, products.RIGHT)
    found = torch.einsum("gnrt,gort->gno", lefts.double(), rights.double())
    return left, each, found, torch.einsum("gnr,gor->gno", left.double(), right.double())
