"""Each op of the text path at the sizes of `mini`: time, share of what this machine gives; the reference too.

Small calls (1 and 4 rows) are held against the bandwidth of a bf16 matrix-vector product, large ones against the speed
of a bf16 matrix product, both measured in the same run with torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from spyglass.bench.machine import announce, positive
from spyglass.ops.declare import Ops
from spyglass.ops.table import bind_ops
from spyglass.quant.formats import BF16, FP4, FakeQuant, Format, fp8
from spyglass.quant.packed import Packed, empty_packed

_HIDDEN, _WIDTH, _EXPERTS, _CHOSEN, _HEADS, _DIM, _WINDOW = 1024, 512, 64, 6, 16, 512, 128
_FORMATS = {"bf16": BF16, "fp8": fp8((128, 128)), "fp4": FP4}
_BEYOND_CACHES = 256 << 20  # bytes
_E4M3 = FakeQuant(element="e4m3", block=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call; `nbytes` of weights or rows it must read, `flops` it must do."""

    name: str
    call: Callable[[Ops], object]
    nbytes: int
    flops: int = 0


def run(argv: Sequence[str]) -> int:
    """Print one line per op and size."""
    parser = argparse.ArgumentParser(prog="spyglass bench ops", description=__doc__)
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads")
    parser.add_argument("--rows", type=positive, nargs="*", default=[1, 4, 2048], help="rows per call")
    parser.add_argument("--no-baseline", action="store_true", help="leave the reference out")
    args = parser.parse_args(argv)
    announce(args.threads)
    bandwidth, speed = ceilings()
    print(f"torch, bf16: matrix-vector {bandwidth / 1e9:.1f} GB/s, matrix product {speed / 1e9:.0f} GFLOP/s")
    fast, slow = bind_ops("cpu", "bfloat16"), bind_ops("cpu", "bfloat16", "reference")
    with torch.no_grad():
        for rows in args.rows:
            for case in cases(rows):
                report(case, rows, fast, None if args.no_baseline else slow, bandwidth, speed)
    return 0


def report(case: Case, rows: int, fast: Ops, slow: Ops | None, bandwidth: float, speed: float) -> None:
    """Best time of the chosen implementation and of the reference, and the share of the nearer ceiling."""
    seconds = best(lambda: case.call(fast))
    bound = max(case.nbytes / bandwidth, case.flops / speed)
    baseline = "" if slow is None else f"  reference {best(lambda: case.call(slow), 1) * 1e6:11.1f} us"
    print(
        f"{case.name:<22} {rows:>5} rows {seconds * 1e6:10.1f} us {case.nbytes / seconds / 1e9:6.1f} GB/s "
        f"{case.flops / seconds / 1e9:6.0f} GFLOP/s {bound / seconds:5.0%}{baseline}",
        flush=True,
    )


def best(call: Callable[[], object], repeats: int = 20) -> float:
    """Seconds of the fastest of `repeats` calls after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def ceilings() -> tuple[float, float]:
    """Bytes per second of a bf16 matrix-vector product from memory, operations per second of a large bf16 product."""
    wide, x = torch.randn(65536, 2048).bfloat16(), torch.randn(1, 2048).bfloat16()
    square = torch.randn(2048, 2048).bfloat16()
    linear = torch.nn.functional.linear
    return wide.nbytes / best(lambda: linear(x, wide), 5), 2 * 2048**3 / best(lambda: linear(square, square), 5)


def weight(format: Format, *shape: int) -> Packed:
    """Random codes under middling scales: what they decode to does not matter to time."""
    packed = empty_packed(format, shape)
    if format is BF16:
        return Packed(format, torch.randn(shape).bfloat16(), None, shape)
    packed.data.view(torch.uint8).random_(0, 120)
    assert packed.scale is not None
    packed.scale.fill_(118)
    return packed


def cases(rows: int) -> list[Case]:
    """Every op that has a compiled kernel and takes a share of a step."""
    products = [_linear_case(rows, name) for name in _FORMATS]
    experts = [_expert_case(rows, name) for name in ("bf16", "fp4")]
    return [*products, *experts, *_row_cases(rows), _attention_case(rows)]


def _in_turn(
    held: Sequence[Sequence[Packed]], call: Callable[[Ops, Sequence[Packed]], object]
) -> Callable[[Ops], object]:
    """Calls that take other weights every time, so many that no cache holds them, as in a step of a model."""
    turn = cycle(held)
    return lambda ops: call(ops, next(turn))


def _linear_case(rows: int, name: str) -> Case:
    format, x = _FORMATS[name], torch.randn(rows, _HIDDEN).bfloat16()
    rounding = None if format is BF16 else _E4M3
    first = weight(format, 8192, _HIDDEN)
    others = [(weight(format, 8192, _HIDDEN),) for _ in range(_BEYOND_CACHES // first.data.nbytes)]
    return Case(
        name=f"linear_block {name}",
        call=_in_turn([(first,), *others], lambda ops, one: ops.linear_block(x, one[0], rounding=rounding)),
        nbytes=first.data.nbytes,
        flops=2 * rows * 8192 * _HIDDEN,
    )


def _expert_case(rows: int, name: str) -> Case:
    format, x = _FORMATS[name], torch.randn(rows, _HIDDEN).bfloat16()
    rounding = None if format is BF16 else _E4M3
    ids = torch.stack([torch.randperm(_EXPERTS)[:_CHOSEN] for _ in range(rows)]).int()
    weights, up, down = torch.rand(rows, _CHOSEN), (_EXPERTS, _WIDTH, _HIDDEN), (_EXPERTS, _HIDDEN, _WIDTH)
    nbytes = 3 * weight(format, *up).data.nbytes // _EXPERTS * len(ids.unique())
    layers = min(_BEYOND_CACHES // nbytes + 1, 12)
    held = [(weight(format, *up), weight(format, *up), weight(format, *down)) for _ in range(layers)]
    return Case(
        name=f"experts_grouped {name}",
        call=_in_turn(
            held, lambda ops, stacks: ops.experts_grouped(x, ids, weights, *stacks, limit=10.0, rounding=rounding)
        ),
        nbytes=nbytes,
        flops=rows * _CHOSEN * 6 * _HIDDEN * _WIDTH,
    )


def _row_cases(rows: int) -> list[Case]:
    streams, z = torch.randn(rows, 4, _HIDDEN).bfloat16(), torch.randn(rows, _HIDDEN).bfloat16()
    fn, scale, base = torch.randn(24, 4 * _HIDDEN), torch.randn(3), torch.randn(24)
    post, comb, gate = torch.rand(rows, 4), torch.rand(rows, 4, 4), torch.randn(_EXPERTS, _HIDDEN)
    q, angle = torch.randn(rows, _HEADS, _DIM).bfloat16(), torch.randn(rows, 32)
    mix: dict[str, Any] = {"norm_eps": 1e-6, "hc_eps": 1e-6, "rounds": 20}
    return [
        Case(
            name="hyper_mix",
            call=lambda ops: ops.hyper_mix(streams, fn, scale, base, **mix),
            nbytes=streams.nbytes + fn.nbytes,
            flops=2 * rows * fn.numel(),
        ),
        Case(
            name="hyper_expand",
            call=lambda ops: ops.hyper_expand(z, streams, post, comb),
            nbytes=2 * streams.nbytes + z.nbytes,
        ),
        Case(
            name="rms_norm stepwise",
            call=lambda ops: ops.rms_norm(q, None, eps=1e-6, stepwise=True),
            nbytes=2 * q.nbytes,
        ),
        Case(name="rope_partial", call=lambda ops: ops.rope_partial(q, angle.cos(), angle.sin()), nbytes=2 * q.nbytes),
        Case(name="fake_quant", call=lambda ops: ops.fake_quant(z, _E4M3), nbytes=2 * z.nbytes),
        Case(
            name="router_topk",
            call=lambda ops: ops.router_topk(z, gate, k=_CHOSEN, scale=1.5, bias_E=None),
            nbytes=z.nbytes + gate.nbytes,
            flops=2 * rows * gate.numel(),
        ),
    ]


def _attention_case(rows: int) -> Case:
    """The last `rows` queries of a prompt, window only."""
    total = rows + _WINDOW
    pages = torch.randn(-(-total // 64), 64, _DIM).bfloat16()
    table, last = torch.arange(len(pages), dtype=torch.int32)[None], torch.arange(_WINDOW, total, dtype=torch.int32)
    q, seq = torch.randn(rows, _HEADS, _DIM).bfloat16(), torch.zeros(rows, dtype=torch.int32)
    first, sink = last - (_WINDOW - 1), torch.zeros(_HEADS)
    options = {"scale": _DIM**-0.5, "window_width": _WINDOW}
    return Case(
        name="sparse_attention",
        call=lambda ops: ops.sparse_attention(q, pages, table, seq, first, last, sink, **options),
        nbytes=q.nbytes * 2 + pages.nbytes,
        flops=rows * _HEADS * _WINDOW * _DIM * 4,
    )
