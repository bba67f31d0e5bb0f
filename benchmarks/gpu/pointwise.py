"""Every Triton op against its reference on this GPU, then the row-wise ones timed at V4's and V4.1's sizes.

    PYTHONPATH=. OUT=folder python3 benchmarks/gpu/pointwise.py [--no-times] [--no-checks] [--names hyper_mix ...]

Inputs are surrounded by NaN, outputs begin as NaN. Times are those of a call inside a CUDA graph of many calls.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from spyglass.ops import gpu
from spyglass.ops.launches import pretended, recorded
from spyglass.quant.formats import FakeQuant
from tests.ops.call import DTYPES, Source, assert_agrees, poisoned, run_call, tolerance_of
from tests.ops.cases import CASES
from tests.ops.triton_lane import triton_ops

STARTED = time.time()
CHECKED_ROWS = (1, 37, 300)
ROWS = (1, 8, 32, 128, 4096)
F32 = torch.float32
# "apart": V4 with kernels that wait for one another
SIZES = {"v4": (4096, 256, 1024, 6), "v41": (5120, 384, 1280, 8), "apart": (4096, 256, 1024, 6)}


def triton_function(op: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"spyglass.ops.{op}.triton"), op)


def runs(op: str, dtype: str) -> bool:
    return bool(importlib.import_module(f"spyglass.ops.{op}.triton").usable("cuda", dtype))


def compile_case(op: str, case: str, dtype: str, generation: int) -> str:
    """Compile what a case launches, in a process that leaves the GPU alone."""
    try:
        with recorded(generation) as kernels:
            for rows in CHECKED_ROWS:
                run_call(triton_function(op), CASES[op, case](Source(DTYPES[dtype], rows)), "cpu", poisoned)
        with pretended(generation):
            for kernel in kernels:
                kernel.compile()
    except Exception as error:
        return f"{op} {case} {dtype}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def overlapping(on: bool) -> None:
    """Whether kernels are launched so that they overlap, from now on."""
    for name, module in list(sys.modules.items()):
        if name.startswith("spyglass.ops.") and hasattr(module, "overlap") and name != "spyglass.ops.gpu":
            module.overlap = gpu.overlap if on else lambda x: {"OVERLAPS": False}  # type: ignore[attr-defined]


def compile_sizes(name: str, size: str, generation: int) -> str:
    """Compile what the timed calls launch."""
    try:
        if size == "apart":
            for op in triton_ops():
                importlib.import_module(f"spyglass.ops.{op}.triton_kernel")
        overlapping(size != "apart")
        with torch.inference_mode(), recorded(generation) as kernels:
            for rows in (1, 8, 128, 4096):
                TIMED[name](Sizes(size, rows, "meta", 1))(0)
        with pretended(generation):
            for kernel in kernels:
                kernel.compile()
    except Exception as error:
        return f"{name} {size}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def check(op: str, case: str, dtype: str, rows: int) -> dict[str, Any]:
    call = CASES[op, case](Source(DTYPES[dtype], rows))
    reference = getattr(importlib.import_module(f"spyglass.ops.{op}.reference"), op)
    found: dict[str, Any] = {"op": op, "case": case, "dtype": dtype, "rows": rows, "ok": True, "note": ""}
    try:
        expected = run_call(reference, call)
        there = run_call(reference, call, "cuda")
        results = run_call(triton_function(op), call, "cuda", poisoned)
        torch.cuda.synchronize()
        same = [float((a == b).float().mean()) for a, b in zip(results, there, strict=True) if a.numel()]
        found["same_as_reference_on_gpu"] = min(same, default=1.0)
        assert_agrees(call, results, expected, tolerance_of(DTYPES[dtype]), f"{op} {case}")
    except Exception as error:
        found |= {"ok": False, "note": f"{type(error).__name__}: {str(error)[:300]}"}
        if not isinstance(error, AssertionError):
            traceback.print_exc()
    return found


class Sizes:
    """Tensors of one released size; `copies` of each weight, so that they come from memory and not from a cache."""

    def __init__(self, size: str, rows: int, device: str, copies: int) -> None:
        self.hidden, self.experts, self.low, self.k = SIZES[size]
        self.rows, self.device, self.copies = rows, device, copies

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(dtype)

    def weights(self, *shape: int, scale: float = 0.02) -> list[torch.Tensor]:
        return [self(*shape, dtype=F32, scale=scale) for _ in range(self.copies)]


Timed = Callable[[Sizes], Callable[[int], Any]]
TIMED: dict[str, Timed] = {}


def timed(make: Timed) -> Timed:
    TIMED[make.__name__] = make
    return make


@timed
def hyper_mix(s: Sizes) -> Callable[[int], Any]:
    op, x, fn = triton_function("hyper_mix"), s(s.rows, 4, s.hidden), s.weights(24, 4 * s.hidden)
    scale, base = s(3, dtype=F32), s(24, dtype=F32)
    return lambda i: op(x, fn[i % len(fn)], scale, base, norm_eps=1e-6, hc_eps=1e-6, rounds=20)


@timed
def hyper_collapse(s: Sizes) -> Callable[[int], Any]:
    op, x, pre = triton_function("hyper_collapse"), s(s.rows, 4, s.hidden), s(s.rows, 4, dtype=F32)
    return lambda i: op(x, pre)


@timed
def hyper_expand(s: Sizes) -> Callable[[int], Any]:
    op, z, x = triton_function("hyper_expand"), s(s.rows, s.hidden), s(s.rows, 4, s.hidden)
    post, comb = s(s.rows, 4, dtype=F32), s(s.rows, 4, 4, dtype=F32)
    return lambda i: op(z, x, post, comb)


@timed
def hyper_read(s: Sizes) -> Callable[[int], Any]:
    op, x, fn = triton_function("hyper_read"), s(s.rows, 4, s.hidden), s.weights(24, 4 * s.hidden)
    scale, base, weight = s(3, dtype=F32), s(24, dtype=F32), s(s.hidden, dtype=F32)
    options = {"norm_eps": 1e-6, "hc_eps": 1e-6, "rounds": 20, "eps": 1e-6}
    return lambda i: op(x, fn[i % len(fn)], scale, base, weight, **options)


@timed
def hyper_write_read(s: Sizes) -> Callable[[int], Any]:
    op, x, fn = triton_function("hyper_write_read"), s(s.rows, 4, s.hidden), s.weights(24, 4 * s.hidden)
    scale, base, weight = s(3, dtype=F32), s(24, dtype=F32), s(s.hidden, dtype=F32)
    post, comb = s(s.rows, 4, dtype=F32), s(s.rows, 4, 4, dtype=F32)
    routed, shared = s(s.rows, s.hidden, dtype=F32), s(s.rows, s.hidden)
    options = {"norm_eps": 1e-6, "hc_eps": 1e-6, "rounds": 20, "eps": 1e-6}
    return lambda i: op(routed, shared, x, post, comb, fn[i % len(fn)], scale, base, weight, **options)


@timed
def window_row(s: Sizes) -> Callable[[int], Any]:
    op, x, angle = triton_function("row_finish"), s(s.rows, 512), s(s.rows, 32, dtype=F32)
    pages, write = s(s.rows, 1, 512), torch.arange(s.rows, device=s.device)
    options = {"weight_D": s(512, dtype=F32), "eps": 1e-6, "quant": FakeQuant(element="e4m3", block=64)}
    options |= {"dims": 448, "tail_bf16": True, "pages_NBD": pages, "write_T": write}
    return lambda i: op(x, angle, angle, **options)


@timed
def index_query(s: Sizes) -> Callable[[int], Any]:
    op, x, angle = triton_function("row_finish"), s(s.rows, 64, 128), s(s.rows, 32, dtype=F32)
    quant = FakeQuant(element="e2m1", block=32)
    return lambda i: op(x, angle, angle, hadamard=True, quant=quant)


@timed
def query_heads(s: Sizes) -> Callable[[int], Any]:
    op, x, angle = triton_function("row_finish"), s(s.rows, 64, 512), s(s.rows, 32, dtype=F32)
    return lambda i: op(x, angle, angle, eps=1e-6, stepwise=True)


@timed
def rms_norm(s: Sizes) -> Callable[[int], Any]:
    op, x, weight = triton_function("rms_norm"), s(s.rows, s.hidden), s(s.hidden, dtype=F32)
    return lambda i: op(x, weight, eps=1e-6)


@timed
def q_head_norm(s: Sizes) -> Callable[[int], Any]:
    op, x = triton_function("rms_norm"), s(s.rows, 64, 512)
    return lambda i: op(x, None, eps=1e-6, stepwise=True)


@timed
def q_rope(s: Sizes) -> Callable[[int], Any]:
    op, x, angle = triton_function("rope_partial"), s(s.rows, 64, 512), s(s.rows, 32, dtype=F32)
    return lambda i: op(x, angle, angle)


@timed
def kv_round(s: Sizes) -> Callable[[int], Any]:
    op, x, spec = triton_function("fake_quant"), s(s.rows, 512), FakeQuant(element="e4m3", block=64)
    return lambda i: op(x, spec, dims=448, tail_bf16=True)


@timed
def index_hadamard(s: Sizes) -> Callable[[int], Any]:
    op, x = triton_function("hadamard"), s(s.rows, 64, 128)
    return lambda i: op(x)


@timed
def index_round(s: Sizes) -> Callable[[int], Any]:
    op, x, spec = triton_function("fake_quant"), s(s.rows, 64, 128), FakeQuant(element="e2m1", block=32)
    return lambda i: op(x, spec)


@timed
def router_topk(s: Sizes) -> Callable[[int], Any]:
    op, x, weight = triton_function("router_topk"), s(s.rows, s.hidden), s.weights(s.experts, s.hidden)
    bias = s(s.experts, dtype=F32)
    return lambda i: op(x, weight[i % len(weight)], k=s.k, scale=1.5, bias_E=bias)


@timed
def swiglu(s: Sizes) -> Callable[[int], Any]:
    op, gate = triton_function("swiglu"), s(s.rows, 2048)
    return lambda i: op(gate, gate, limit=10.0)


@timed
def add_shared(s: Sizes) -> Callable[[int], Any]:
    op, routed, shared = triton_function("add_shared"), s(s.rows, s.hidden, dtype=F32), s(s.rows, s.hidden)
    return lambda i: op(routed, shared)


def microseconds(call: Callable[[int], Any], calls: int) -> float:
    """Time of one call, of the best replay of a graph of `calls`."""
    for i in range(2):
        call(i)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    times = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / calls)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--only", nargs="*", default=None, help="ops that are checked")
    parser.add_argument("--names", nargs="*", default=list(TIMED), help="calls that are timed")
    args = parser.parse_args()
    generation = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    ops = [op for op in triton_ops() if not args.no_checks and (args.only is None or op in args.only)]
    dtypes = ("bfloat16", "float32")
    cases = [(op, case, dtype) for op, case in CASES if op in ops for dtype in dtypes if runs(op, dtype)]
    sizes = [] if args.no_times else [(name, size) for size in SIZES for name in args.names]
    with ProcessPoolExecutor(min(os.cpu_count() or 2, 16), get_context("spawn")) as pool:
        jobs = [pool.submit(compile_case, *case, generation) for case in cases]
        jobs += [pool.submit(compile_sizes, *one, generation) for one in sizes]
        complaints = [job.result() for job in jobs]
    for complaint in filter(None, complaints):
        print("compile:", complaint)
    print(f"compiled {len(jobs)} in {time.time() - STARTED:.0f} s", flush=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    checks = [check(*case, rows) for case in cases for rows in CHECKED_ROWS]
    torch.use_deterministic_algorithms(False)
    print(f"checked at {time.time() - STARTED:.0f} s", flush=True)
    times: dict[str, dict[str, dict[int, float]]] = {}
    for name, size in sizes:
        if time.time() - STARTED > 105:
            print("out of time before", name, size, flush=True)
            break
        overlapping(size != "apart")
        for rows in ROWS:
            copies = 30 if rows <= 128 else 2
            try:
                with torch.inference_mode():
                    call = TIMED[name](Sizes(size, rows, "cuda", copies))
                    taken = microseconds(call, 30 if rows <= 128 else 8)
                times.setdefault(name, {}).setdefault(size, {})[rows] = round(taken, 2)
            except Exception as error:
                print(name, size, rows, type(error).__name__, str(error)[:200])
    if out := os.environ.get("OUT"):
        result = {"device": torch.cuda.get_device_name(), "checks": checks, "microseconds": times}
        Path(out, "pointwise.json").write_text(json.dumps(result, indent=1))
    for name, by_size in times.items():
        for size, by_rows in by_size.items():
            print(f"{name:16} {size:4} " + " ".join(f"{by_rows.get(rows, float('nan')):9.2f}" for rows in ROWS))
    print(f"us per call at {ROWS} rows; {time.time() - STARTED:.0f} s in all")
    for one in checks:
        if one["ok"]:
            continue
        print("WRONG", one["op"], one["case"], one["dtype"], one["rows"], one["note"])
    print(f"{sum(one['ok'] for one in checks)} of {len(checks)} checks right;", end=" ")
    equal: dict[str, float] = {}
    for one in checks:
        name = f"{one['op']} {one['dtype']}"
        equal[name] = min(equal.get(name, 1.0), one.get("same_as_reference_on_gpu", 0.0))
    print("equal bits:", ", ".join(f"{name} {share:.4f}" for name, share in equal.items() if share < 1))


if __name__ == "__main__":
    main()
