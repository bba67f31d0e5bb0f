"""Kernels of attention on one GPU: right, and how fast. `OUT=folder PYTHONPATH=. python benchmarks/gpu/attention.py`.

Variants compile in child processes first. Each is compared with the op's reference on the GPU (pages and outputs full
of NaN, short and empty rows, wrapped rings), then timed as replays of a CUDA graph whose launches read other pages each
time, so that no cache holds them. `bound` is bytes / 4.3 TB/s, or FLOPs / 685 TFLOP/s. JSON goes to
$OUT/attention.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from spyglass.ops.cache_write import reference as write_reference
from spyglass.ops.cache_write import triton as write_triton
from spyglass.ops.compress_pool import reference as pool_reference
from spyglass.ops.compress_pool import triton as pool_triton
from spyglass.ops.compress_rows import reference as rows_reference
from spyglass.ops.compress_rows import triton as rows_triton
from spyglass.ops.index_blocks import reference as blocks_reference
from spyglass.ops.index_blocks import triton as blocks_triton
from spyglass.ops.index_topk import reference as topk_reference
from spyglass.ops.index_topk import triton as topk_triton
from spyglass.ops.rms_norm.reference import rms_norm
from spyglass.ops.rope_partial import reference as rope_reference
from spyglass.ops.rope_partial import triton as rope_triton
from spyglass.ops.sparse_attention import reference as attention_reference
from spyglass.ops.sparse_attention import triton as attention
from spyglass.ops.sparse_attention.reference import Turn
from spyglass.ops.sparse_attention.triton import Launch

START = time.time()
LIMIT = float(os.environ.get("LIMIT", "160"))
H, D, R, W, X, PAGE, SCALE = 64, 512, 64, 128, 512, 64, 512**-0.5
DEV, BF = "cuda", torch.bfloat16
MARK = Path(os.environ.get("OUT", "/tmp")) / "attention-streams-came-back"
NAN = float("nan")
GOALS = {1: 9.0, 8: 14.0, 32: 25.0, 128: 42.0}
PROTOTYPE = {1: 7.9, 8: 14.3, 32: 27.3, 128: 43.7}
STREAM, STREAM_PARTS = 12, 6  # warps of the streaming kernel: mark of its launches
DECODE = {
    1: [(16, 32, 20, 4, 1), (16, 16, 40, 4, 1), (16, 64, 10, 4, 1), (16, 64, 10, 8, 1), (16, 32, 20, 2, 1)],
    8: [(64, 64, 10, 8, 1), (32, 64, 10, 8, 1), (16, 64, 10, 4, 1), (32, 32, 20, 4, 1), (64, 64, 10, STREAM, 2)],
    32: [(64, 64, 4, 8, 1), (16, 64, 10, 4, 1), (64, 64, 10, 8, 1), (64, 64, 4, STREAM, 2)],
    128: [(64, 64, 1, STREAM, 2), (64, 64, 2, STREAM, 2)],
}
PREFILL = [(64, 128, 1, 8, 1), (64, 64, 1, STREAM, 2)]


def ints(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(DEV)


def launch_of(numbers: tuple[int, ...]) -> Launch:
    heads, keys, splits, warps, stages = numbers
    return Launch(heads=heads, keys=keys, splits=splits, warps=warps, stages=stages, stream=warps == STREAM)


def label(launch: Launch) -> str:
    return " ".join(f"{key}{value}" for key, value in asdict(launch).items())


class Memory:
    """Pages of window rows and of compressed rows, and sequences that hold random ones."""

    def __init__(self, rows: int, dtype: torch.dtype = BF) -> None:
        pages = rows // PAGE
        self.window = torch.randn(pages, PAGE, D, device=DEV).to(dtype)
        self.pool = torch.randn(pages, PAGE, D, device=DEV).to(dtype)
        self.pages = pages

    def decode(self, rows: int, entries: int = 1024) -> dict[str, Any]:
        """Rows at the end of sequences of their own, whose pages nobody else has read just now."""
        position = torch.randint(W, 60000, (rows,))
        topk_indices = torch.rand(rows, entries).argsort(1)[:, :X].sort(1).values
        return {
            "q": (1.5 * torch.randn(rows, H, D, device=DEV)).to(self.window.dtype),
            "window": (self.window, self.table(rows, 3), ints(range(rows)), ints(position - W + 1), ints(position)),
            "pool": (self.pool, self.table(rows, entries // PAGE), ints([entries] * rows), ints(topk_indices)),
            "sink": torch.randn(H, device=DEV),
            "turn": turn(rows),
        }

    def table(self, rows: int, width: int) -> torch.Tensor:
        return ints(torch.randint(0, self.pages, (rows, width)))


def turn(rows: int) -> Turn:
    angle = 100 * torch.randn(rows, R // 2, device=DEV)
    return Turn(cos_TR=angle.cos(), sin_TR=angle.sin(), eps=1e-6, stepwise=True)


def edges(rows: int, dtype: torch.dtype, topk_indices: bool, page: int = PAGE) -> dict[str, Any]:
    """What can go wrong: pages of NaN, rows without keys, wrapped rings, indices of nothing, spans that look ahead."""
    seqs, entries, ring = 3, 700, 9
    window = torch.full((seqs * ring + 2, PAGE, D), NAN, device=DEV, dtype=dtype)
    pool = torch.full((seqs * -(-entries // page) + 2, page, D), NAN, device=DEV, dtype=dtype)
    window_table = ints(torch.randperm(len(window))[: seqs * ring].view(seqs, ring))
    pool_table = ints(torch.randperm(len(pool))[: seqs * -(-entries // page)].view(seqs, -1))
    seq = torch.randint(0, seqs, (rows,)).sort().values
    hi = torch.randint(0, 3000, (rows,))
    top = torch.zeros(seqs).long().scatter_reduce(0, seq, hi, "amax", include_self=False)
    hi = torch.maximum(hi, top[seq] - ring * PAGE + 1)  # what the ring still holds
    lo = torch.maximum((hi - torch.randint(0, W, (rows,))).clamp(min=0), top[seq] - ring * PAGE + 1)
    lo[rows // 3 :: 5] = torch.maximum(hi - 400, top[seq] - ring * PAGE + 1).clamp(min=0)[rows // 3 :: 5]
    visible = torch.randint(0, entries + 1, (rows,))
    visible[::3] = 0
    lo[-1], hi[-1], visible[-1] = 1, 0, 0  # padding
    if rows > 4:
        lo[1], visible[1] = hi[1] + 1, 5  # compressed rows alone
    for s in range(seqs):
        first = max(0, int(top[s]) - ring * PAGE + 1)
        for row in range(first, int(top[s]) + 1):
            window[window_table[s, row // PAGE % ring], row % PAGE] = torch.randn(D, device=DEV).to(dtype)
        most = int(visible[seq == s].max()) if bool((seq == s).any()) else 0
        for row in range(most):
            pool[pool_table[s, row // page], row % page] = torch.randn(D, device=DEV).to(dtype)
    chosen = torch.rand(rows, entries + 50).argsort(1)[:, :X]  # some lie behind what is visible
    chosen[torch.rand(rows, X) < 0.3] = -1
    chosen[::2] = chosen[::2].sort(1).values
    return {
        "q": (1.5 * torch.randn(rows, H, D, device=DEV)).to(dtype),
        "window": (window, window_table, ints(seq), ints(lo), ints(hi)),
        "pool": (pool, pool_table, ints(visible), ints(chosen) if topk_indices else None),
        "sink": torch.randn(H, device=DEV),
        "turn": turn(rows),
        "widths": (400, X if topk_indices else entries),
    }


def expected(case: dict[str, Any], turned: bool, pooled: bool, rows: Any = slice(None)) -> torch.Tensor:
    q, given = case["q"][rows], case["turn"]
    cos, sin = given.cos_TR[rows], given.sin_TR[rows]
    if turned:
        q = rope_reference.rope_partial(rms_norm(q, None, eps=given.eps, stepwise=given.stepwise), cos, sin)
    pages, table, *lists = case["window"]
    lists = [x[rows] for x in lists]
    options: dict[str, Any] = {"scale": SCALE, "window_width": max(1, int((lists[2] - lists[1]).max()) + 1)}
    if pooled:
        pool, pool_table, visible, topk_indices = case["pool"]
        width = topk_indices.shape[1] if topk_indices is not None else int(visible.max())
        topk_indices = None if topk_indices is None else topk_indices[rows]
        options |= {
            "pool_NBD": pool,
            "pool_table_SP": pool_table,
            "visible_T": visible[rows],
            "topk_indices_TX": topk_indices,
        }
        options["pool_width"] = width
    out = attention_reference.sparse_attention(q, pages, table, *lists, case["sink"], **options)
    return rope_reference.rope_partial(out, cos, sin, inverse=True) if turned else out


def run(case: dict[str, Any], launch: Launch, turned: bool, pooled: bool = True) -> torch.Tensor:
    pool = case["pool"] if pooled else None
    widths = case.get("widths", (W, X)) if pooled else (case.get("widths", (W, 0))[0], 0)
    given = case["turn"] if turned else None
    return attention.attend(case["q"], case["window"], pool, case["sink"], SCALE, launch, given, widths)


def judge(got: torch.Tensor, want: torch.Tensor, bound: float) -> float:
    """Worst relative error of a row; a number that is none is an error."""
    got, want = got.float().flatten(1), want.float().flatten(1)
    if not bool(got.isfinite().all()):
        raise RuntimeError(f"{int((~got.isfinite()).any(1).sum())} rows are not finite")
    error = float(((got - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-3)).max())
    if not error < bound:
        raise RuntimeError(f"wrong: error {error:.3g}")
    return error


def poison() -> None:
    """What later allocations will find."""
    blocks = [torch.full((1 << 24,), NAN, device=DEV) for _ in range(8)]
    blocks += [torch.full((1 << 16,), NAN, device=DEV) for _ in range(16)]
    del blocks


def timed(calls: list[Callable[[], Any]], replays: int = 9) -> float:
    """Microseconds of a call, in one graph of all of them (median of replays)."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph, start, stop = torch.cuda.CUDAGraph(), torch.cuda.Event(True), torch.cuda.Event(True)
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times[2:])[replays // 2] * 1e3 / len(calls)


class Report:
    """Rows of the tables, and what failed."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.errors: list[dict[str, Any]] = []

    def guard(self, name: str, what: str, call: Callable[[], dict[str, Any]]) -> None:
        try:
            if "streamTrue" in what and not survived():
                raise RuntimeError("it hung or failed while it was tried on a few rows")
            if time.time() - START > LIMIT:
                raise TimeoutError("time is up")
            row = {"name": name, "what": what, **call()}
            self.rows.append(row)
            print(
                f"{name:28s} {what:44s} "
                + " ".join(f"{k}={v:.4g}" for k, v in row.items() if k not in ("name", "what"))
            )
        except Exception as error:
            self.errors.append({"name": name, "what": what, "error": repr(error)[:500]})
            print("FAIL", name, what, repr(error)[:300])
        sys.stdout.flush()


def attention_decode(report: Report, memory: Memory) -> None:
    for rows, variants in DECODE.items():
        sets = [memory.decode(rows) for _ in range({1: 60, 8: 16, 32: 6, 128: 3}[rows])]
        hard = [edges(rows, BF, True), edges(rows, BF, False)]
        wants = {t: [expected(c, t, True) for c in (sets[0], *hard)] for t in (True, False)}
        for numbers in variants:
            launch = launch_of(numbers)

            def one(launch: Launch = launch, sets: Any = sets, hard: Any = hard, wants: Any = wants) -> dict[str, Any]:
                errors, out = [], {}
                for turned in (False, True):
                    for case, want in zip((sets[0], *hard), wants[turned], strict=True):
                        poison()
                        errors.append(judge(run(case, launch, turned), want, 2e-2))
                    out["fused" if turned else "plain"] = timed([partial(run, s, launch, turned) for s in sets])
                return {"us": out["fused"], "plain_us": out["plain"], "error": max(errors)}

            report.guard(f"decode {rows}", label(launch), one)


def attention_prefill(report: Report, memory: Memory) -> None:
    rows = 4096
    position = torch.arange(rows)
    lo = (position - W + 1).clamp(min=0)
    table = ints(torch.randperm(memory.pages)[: rows // PAGE][None])
    for entries in (1024, 8192):
        pool_table = ints(torch.randperm(memory.pages)[: entries // PAGE][None])
        topk_indices = torch.rand(rows, entries).argsort(1)[:, :X].sort(1).values
        zero = ints([0] * rows)
        case = {
            "q": (1.5 * torch.randn(rows, H, D, device=DEV)).to(BF),
            "window": (memory.window, table, zero, ints(lo), ints(position)),
            "pool": (memory.pool, pool_table, zero + entries, ints(topk_indices)),
            "sink": torch.randn(H, device=DEV),
            "turn": turn(rows),
        }
        some = torch.tensor([0, 1, 63, 64, 127, 128, 129, 1000, 2047, 2048, rows - 1], device=DEV)
        for pooled in (True, False) if entries == 1024 else (True,):
            keys = W + X if pooled else W
            wants = {t: expected(case, t, pooled, some) for t in (True, False)}
            for numbers in PREFILL:
                launch = launch_of(numbers)

                def one(
                    launch: Launch = launch,
                    pooled: bool = pooled,
                    wants: Any = wants,
                    case: Any = case,
                    keys: int = keys,
                    few: Any = some,
                ) -> dict[str, Any]:
                    out: dict[str, float] = {}
                    errors = []
                    for turned in (False, True):
                        poison()
                        errors.append(judge(run(case, launch, turned, pooled)[few], wants[turned], 2e-2))
                        us = timed([partial(run, case, launch, turned, pooled)] * 3, 5)
                        out["fused" if turned else "plain"] = 4 * rows * H * D * keys / us / 1e6
                    return {"tflops": out["fused"], "plain_tflops": out["plain"], "error": max(errors)}

                report.guard(f"prefill {keys} of {entries}" if pooled else "prefill 128", label(launch), one)


def attention_float32(report: Report) -> None:
    """Values alone: rows of fp32, odd page sizes."""
    for topk_indices in (True, False):
        case = edges(5, torch.float32, topk_indices, page=4)
        for splits in (1, 3):
            launch = Launch(heads=16, keys=16, splits=splits, warps=4, stages=1)
            for turned in (False, True):

                def one(turned: bool = turned, launch: Launch = launch, case: Any = case) -> dict[str, Any]:
                    poison()
                    return {"error": judge(run(case, launch, turned), expected(case, turned, True), 1e-4)}

                report.guard("fp32", f"topk_indices {topk_indices} splits {splits} turned {turned}", one)


def fp4(*shape: int) -> torch.Tensor:
    """Values as the indexer's: exact in bf16, so are their products."""
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=DEV)
    sign = 1 - 2 * torch.randint(0, 2, shape, device=DEV)
    return (
        steps[torch.randint(0, 8, shape, device=DEV)] * sign * 2.0 ** torch.randint(-3, 0, (*shape[:-1], 1), device=DEV)
    ).to(BF)


def index_case(rows: int, visible: torch.Tensor, keys: torch.Tensor, seqs: int) -> tuple[torch.Tensor, ...]:
    width = -(-int(visible.max()) // PAGE)
    table = ints(torch.randint(0, len(keys), (seqs, width)))
    seq = ints(torch.arange(rows) % seqs if seqs > 1 else torch.zeros(rows))
    return fp4(rows, 64, 128), torch.randn(rows, 64, device=DEV).to(BF), keys, table, seq, ints(visible)


def agreement(got: torch.Tensor, scores: torch.Tensor, k: int) -> float:
    """Share of rows whose indices are the reference's; others may differ by entries whose scores differ by rounding."""
    want = topk_reference._pick(scores, min(k, scores.shape[1]), None)
    same = (got == want).all(1)
    for row in (~same).nonzero()[:, 0].tolist():
        mine = got[row][got[row] >= 0].long()
        if len(mine) != int((want[row] >= 0).sum()) or bool((mine.diff() <= 0).any()):
            raise RuntimeError(f"row {row}: {len(mine)} indices, not ascending or not as many as wanted")
        bar = scores[row][want[row][want[row] >= 0].long()].min()
        worst = scores[row][mine].min()
        if bool(worst < bar - 0.02 * bar.abs() - 1e-3):
            raise RuntimeError(f"row {row}: picked {worst}, the bar is {bar}")
    return float(same.float().mean())


def selection(report: Report) -> None:
    """The choice alone, given scores: exact, ties included."""
    for length, kind in ((100, "ties"), (4096, "ties"), (16384, "normal"), (40000, "ties"), (262144, "zeros")):
        for dtype in (BF, torch.float32):

            def one(length: int = length, kind: str = kind, dtype: torch.dtype = dtype) -> dict[str, Any]:
                scores = torch.randn(5, length, device=DEV)
                if kind != "normal":
                    scores = (scores * 2).round() if kind == "ties" else scores * 0
                    scores[:, : length // 3].neg_()  # zeros of both signs
                scores = scores.to(dtype)
                visible = ints([length, length - 1, 513 % length, 0, length // 2])
                scores.masked_fill_(torch.arange(length, device=DEV)[None] >= visible[:, None], -float("inf"))
                group = topk_triton.group_of(length)
                groups = torch.full((5, -(-length // group) if group else 0), NAN, device=DEV, dtype=dtype)
                if group:
                    padded = torch.nn.functional.pad(scores, (0, -length % group), value=-float("inf"))
                    groups = padded.unflatten(1, (-1, group)).amax(-1)
                topk_indices = torch.full((5, min(512, length)), 7777777, device=DEV, dtype=torch.int32)
                topk_triton.select(scores, groups, visible, topk_indices, 512, group=group)
                want = topk_reference._pick(scores.float(), min(512, length), None)
                if not torch.equal(topk_indices, want):
                    raise RuntimeError(f"{int((topk_indices != want).any(1).sum())} rows of 5 differ")
                return {
                    "us": timed(
                        [
                            lambda: topk_triton.select(
                                scores[:1], groups[:1], visible[:1], topk_indices[:1], 512, group=group
                            )
                        ]
                        * 5
                    )
                }

            report.guard(f"select {length}", f"{kind} {dtype}", one)


def index(report: Report) -> None:
    keys = fp4(262144 // PAGE * 4, PAGE, 128)
    options: dict[str, Any] = {"k": X, "stepwise": True, "weight_scale": 1 / 90.5}
    work = [
        (1, 1024, 0),
        (1, 32768, 0),
        (8, 1024, 0),
        (8, 32768, 0),
        (32, 1024, 0),
        (32, 8192, 0),
        (128, 1024, 0),
        (128, 8192, 0),
        (1, 262144, 0),
    ]
    for rows, most, capacity in [*work, (8, 1024, 32768), (4096, 1024, 0), (4096, 8192, 0)]:

        def one(rows: int = rows, most: int = most, capacity: int = capacity) -> dict[str, Any]:
            prefill = rows > 128
            bound = capacity or most
            visible = (torch.arange(rows) + most * 4 - rows + 1) // 4 if prefill else torch.full((rows,), most)
            sets = [
                index_case(rows, visible, keys, 1 if prefill else rows)
                for _ in range(1 if prefill else max(2, 64 // rows))
            ]
            few = slice(0, min(rows, 8))
            poison()
            got = topk_triton.index_topk(*sets[0], max_visible=bound, **options)
            q, w, pages, table, seq, see = sets[0]
            part = (q[few], w[few] * options["weight_scale"], pages, table, seq[few], see[few])
            scores = topk_reference.index_scores(*part, max_visible=most, stepwise=True)
            same = agreement(got[few, : min(X, most)], scores, X)
            us = timed([lambda s=s: topk_triton.index_topk(*s, max_visible=bound, **options) for s in sets], 5)
            scored = timed(
                [
                    lambda s=s: topk_triton.score(
                        s, bound, True, 1 / 90.5, X, None, 0, topk_triton.group_of(bound), True
                    )
                    for s in sets
                ],
                5,
            )
            flops = 2.0 * 64 * 128 * rows * most
            return {
                "us": us,
                "score_us": scored,
                "bound": max(flops / 685e6, (1 if prefill else rows) * most * 256 / 4.3e6),
                "same": same,
            }

        report.guard(f"index {rows} x {most}", f"capacity {capacity or most}", one)


CUTS = [(1, 64, 4, 4, 2), (1, 64, 6, 4, 3), (1, 128, 4, 4, 2), (1, 128, 4, 8, 2), (1, 128, 4, 8, 3), (1, 64, 8, 4, 2)]
MANY_CUTS = [
    (2, 128, 4, 8, 2),
    (2, 64, 4, 4, 2),
    (2, 64, 4, 8, 2),
    (1, 128, 4, 4, 2),
    (1, 128, 4, 8, 2),
    (4, 64, 4, 8, 2),
]


def scoring_of(cut: tuple[int, ...]) -> Any:
    rows, keys, programs, warps, stages = cut
    return topk_triton.Scoring(rows=rows, keys=keys, programs=programs, warps=warps, stages=stages)


def scoring(report: Report) -> None:
    """Scores alone, cut in different ways."""
    keys = fp4(262144 // PAGE * 2, PAGE, 128)
    for rows, most in ((1, 1024), (8, 32768), (32, 8192), (128, 1024), (4096, 1024), (2048, 8192)):
        prefill = rows > 128
        visible = (torch.arange(rows) + most * 4 - rows + 1) // 4 if prefill else torch.full((rows,), most)
        sets = [
            index_case(rows, visible, keys, 1 if prefill else rows) for _ in range(1 if prefill else max(2, 64 // rows))
        ]
        for cut in MANY_CUTS if prefill else CUTS:
            how = scoring_of(cut)

            def one(how: Any = how, sets: Any = sets, most: int = most) -> dict[str, Any]:
                group = topk_triton.group_of(most)
                calls = [partial(topk_triton.score, s, most, True, 0.01, X, None, 0, group, True, how) for s in sets]
                return {"us": timed(calls, 5)}

            report.guard(f"score {rows} x {most}", str(cut), one)


def blocks(report: Report) -> None:
    keys = fp4(262144 // PAGE, PAGE, 128)
    for rows, most in ((1, 32768), (8, 131072), (2, 262144)):

        def one(rows: int = rows, most: int = most) -> dict[str, Any]:
            visible = torch.randint(most - 100, most + 1, (rows,))
            visible[0] = most
            case = index_case(rows, visible, keys, rows)
            options: dict[str, Any] = {"num_blocks": 2048, "block_size": 8, "max_visible": most, "stepwise": True}
            got = blocks_triton.index_blocks(*case, **options)
            part = tuple(x if i in (2, 3) else x[:2] for i, x in enumerate(case))
            want = blocks_reference.index_blocks(*part, **options)
            same = float((got[:2] == want).float().mean())
            picked: dict[str, Any] = {"k": X, "max_visible": most, "stepwise": True, "block_size": 8}
            mine = topk_triton.index_topk(*case, blocks_TY=got, **picked)
            theirs = topk_reference.index_topk(*part, blocks_TY=got[:2], **picked)
            return {
                "us": timed([lambda: blocks_triton.index_blocks(*case, **options)] * 5),
                "candidates_us": timed([lambda: topk_triton.index_topk(*case, blocks_TY=got, **picked)] * 5),
                "same": same,
                "same_picks": float((mine[:2] == theirs).float().mean()),
            }

        report.guard(f"blocks {rows} x {most}", "2048 of 8", one)


def small_ops(report: Report) -> None:
    def pair(
        name: str, reference: Callable[..., Any], ours: Callable[..., Any], args: tuple[Any, ...], **options: Any
    ) -> None:
        def one() -> dict[str, Any]:
            want, _ = reference(*args, **options), poison()
            error = float((ours(*args, **options).float() - want.float()).abs().max())
            if not error < 1e-5:
                raise RuntimeError(f"differs by {error}")
            us = timed([lambda: ours(*args, **options)] * 20)
            return {"us": us, "error": error}

        report.guard(name, "", one)

    for rows in (1, 4096):
        angle = torch.randn(rows, 32, device=DEV)
        q = torch.randn(rows, 64, 512, device=DEV).to(BF)
        pair(
            f"rope_partial {rows} x 64",
            rope_reference.rope_partial,
            rope_triton.rope_partial,
            (q, angle.cos(), angle.sin()),
        )
        kv = torch.randn(rows, 512, device=DEV).to(BF)
        pair(
            f"rope_partial {rows}",
            rope_reference.rope_partial,
            rope_triton.rope_partial,
            (kv, angle.cos(), angle.sin()),
            inverse=True,
        )
        wide = [torch.randn(n, 1024, device=DEV) for n in (rows, rows, 4)]
        phase = torch.arange(rows, device=DEV) % 4
        pair(f"compress_rows {rows}", rows_reference.compress_rows, rows_triton.compress_rows, (*wide, phase))
        state = torch.randn(500, 4096, device=DEV)
        sources = ints(torch.randint(-500, rows, (max(1, rows // 4), 8)))
        sources[:, 7] = 0
        pair(
            f"compress_pool {rows // 4} x 8",
            pool_reference.compress_pool,
            pool_triton.compress_pool,
            (torch.randn(rows, 4096, device=DEV), state, sources),
            overlap=True,
        )
        sources = ints(torch.randint(-500, rows, (max(1, rows // 128), 128)))
        sources[:, 127] = 0
        narrow = torch.randn(500, 1024, device=DEV)
        pair(
            f"compress_pool {max(1, rows // 128)} x 128",
            pool_reference.compress_pool,
            pool_triton.compress_pool,
            (torch.randn(rows, 1024, device=DEV), narrow, sources),
            overlap=False,
        )

        def written(rows: int = rows, kv: torch.Tensor = kv) -> dict[str, Any]:
            pages = torch.full((rows + 3, PAGE, 512), NAN, device=DEV, dtype=BF)
            write = torch.randperm((rows + 3) * PAGE, device=DEV)[:rows]
            write[rows // 2 :: 3] = -1
            other = pages.clone()
            write_triton.cache_write(pages, kv, write)
            write_reference.cache_write(other, kv, write)
            if not torch.equal(pages.view(torch.int16), other.view(torch.int16)):
                raise RuntimeError("other rows were written")
            return {"us": timed([lambda: write_triton.cache_write(pages, kv, write)] * 20)}

        report.guard(f"cache_write {rows}", "", written)


def survived() -> bool:
    """Whether all streaming launches came back when they were tried."""
    return all(MARK.with_suffix(f".{part}").exists() for part in range(STREAM_PARTS))


def warm(part: int, parts: int) -> None:
    """Compile this share of the variants by running them on a few rows; those that may hang come last."""
    torch.manual_seed(part)
    jobs: list[Callable[[], Any]] = []
    case = edges(2, BF, True)
    lists = [(n, True) for variants in DECODE.values() for n in variants] + [
        (n, p) for n in PREFILL for p in (True, False)
    ]
    lists = [entry for entry in lists if entry[0][3] != STREAM]
    for numbers, pooled in dict.fromkeys(lists):
        for turned in (True, False):
            jobs.append(lambda n=numbers, p=pooled, t=turned: run(case, launch_of(n), t, p))
    other = edges(2, BF, False)
    for numbers, _ in dict.fromkeys(lists):
        if numbers not in PREFILL or numbers in [n for variants in DECODE.values() for n in variants]:
            jobs += [lambda n=numbers, t=t: run(other, launch_of(n), t) for t in (True, False)]
    quiet = Report()
    quiet.guard = lambda name, what, call: jobs.append(call)  # type: ignore[method-assign]
    attention_float32(quiet)
    keys = fp4(300, PAGE, 128)
    for rows, most, capacity in (
        (1, 1024, 1024),
        (1, 1024, 32768),
        (1, 1024, 262144),
        (300, 1024, 1024),
        (300, 1024, 8192),
        (1, 1024, 8192),
    ):
        given = index_case(rows, torch.full((rows,), most), keys, 1)
        jobs.append(lambda g=given, c=capacity: topk_triton.index_topk(*g, k=X, max_visible=c, stepwise=True))
    for cut in (*CUTS, *MANY_CUTS):
        for most in (1024, 8192) if cut in CUTS else (1024,):
            given = index_case(4, torch.full((4,), 600), keys, 1)
            group, how = topk_triton.group_of(most), scoring_of(cut)
            jobs.append(
                lambda g=given, m=most, n=group, h=how: topk_triton.score(g, m, True, 0.01, 0, None, 0, n, True, h)
            )
    for job in jobs[part::parts]:
        try:
            job()
            torch.cuda.synchronize()
        except Exception as error:
            print("warm", repr(error)[:200], flush=True)


def try_streams(part: int) -> None:
    """Values of the streaming kernel on a few rows, in a process that may be killed."""
    torch.manual_seed(part)
    cases = {(rows, topk_indices): edges(rows, BF, topk_indices) for rows in (3, 150) for topk_indices in (True, False)}
    kinds = [(p, s, t, True) for p in (True, False) for s in (1, 3) for t in (True, False)]
    kinds += [(True, s, t, False) for s in (1, 3) for t in (True, False)]
    good = True
    for topk_indices, splits, turned, pooled in kinds[part::STREAM_PARTS]:
        for rows in (3, 150):
            what = f"stream rows {rows} topk_indices {topk_indices} splits {splits} turned {turned} pooled {pooled}"
            try:
                poison()
                got = run(cases[rows, topk_indices], launch_of((64, 64, splits, STREAM, 2)), turned, pooled)
                print(what, judge(got, expected(cases[rows, topk_indices], turned, pooled), 2e-2), flush=True)
            except Exception as error:
                print(what, repr(error)[:300], flush=True)
                good = False
    if good:
        MARK.with_suffix(f".{part}").touch()


def summary(report: Report) -> None:
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(f"\n{facts}, {time.time() - START:.0f} s, {len(report.errors)} failures")
    print("decode, 640 keys a row, norm + rope + attention + inverse rope | bound | goal | prototype (attention alone)")
    for rows in DECODE:
        found = sorted((r for r in report.rows if r["name"] == f"decode {rows}"), key=lambda r: r["us"])
        known = f"{rows * (W + X) * D * 2 / 4.3e6:5.1f} | {GOALS[rows]:5.1f} | {PROTOTYPE[rows]:5.1f}"
        for r in found[:3]:
            print(f"  {rows:4d}: {r['us']:6.1f} us, alone {r['plain_us']:6.1f} | {known}  {r['what']} {r['error']:.0e}")
    print(
        "prefill, 4,096 queries: TFLOP/s | goals 470 (640 keys), 300 (128 keys); prototype 323, 199; FlashMLA 470, 259"
    )
    for name in dict.fromkeys(r["name"] for r in report.rows if r["name"].startswith("prefill")):
        found = sorted((r for r in report.rows if r["name"] == name), key=lambda r: -r["tflops"])
        for r in found[:3]:
            print(f"  {name:20s} {r['tflops']:5.0f}, alone {r['plain_tflops']:5.0f}  {r['what']} {r['error']:.0e}")
    for prefix in ("index", "score", "blocks", "select", "rope", "compress", "cache"):
        for row in report.rows:
            if row["name"].startswith(prefix):
                rest = " ".join(f"{k} {v:.4g}" for k, v in row.items() if k not in ("name", "what"))
                print(f"  {row['name']:24s} {row['what']:18s} {rest}")
    for error in report.errors:
        print("  FAILED", error)
    if os.environ.get("OUT"):
        text = json.dumps({**facts, "rows": report.rows, "errors": report.errors}, indent=1)
        (Path(os.environ["OUT"]) / "attention.json").write_text(text, encoding="utf-8")


def main() -> None:
    count = min(12, os.cpu_count() or 1)
    for part in range(STREAM_PARTS):
        MARK.with_suffix(f".{part}").unlink(missing_ok=True)
    children = [subprocess.Popen([sys.executable, __file__, "--warm", str(i), str(count)]) for i in range(count)]
    children += [subprocess.Popen([sys.executable, __file__, "--stream", str(i)]) for i in range(STREAM_PARTS)]
    for child in children:
        try:
            child.wait(timeout=max(1.0, 75 - (time.time() - START)))
        except subprocess.TimeoutExpired:
            child.kill()
    print(f"compiled after {time.time() - START:.0f} s", flush=True)
    torch.manual_seed(0)
    report = Report()
    memory = Memory(1 << 17)
    for part in (attention_decode, attention_prefill):
        part(report, memory)
    del memory
    for other in (index, scoring, selection, blocks, attention_float32, small_ops):
        other(report)
    summary(report)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--warm"]:
        warm(int(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1:2] == ["--stream"]:
        try_streams(int(sys.argv[2]))
    else:
        main()
