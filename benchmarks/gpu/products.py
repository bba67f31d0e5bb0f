"""Products of the text path on one GPU: every launch configuration compiled, checked and timed.

Run: PYTHONPATH=. OUT=folder python3 benchmarks/gpu/products.py. Kernels are compiled by child processes, checked
against the fp32 reference on the GPU with poisoned memory, then timed as replays of a CUDA graph over weights that a
cache does not hold. `share` is the memory (4.3 TB/s) or arithmetic (685 TFLOP/s) bound over the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spyglass.ops.experts_grouped import reference as experts_reference
from spyglass.ops.experts_grouped import triton as experts
from spyglass.ops.linear_block import reference as linear_reference
from spyglass.ops.linear_block import triton as linear
from spyglass.quant.formats import BF16, FP4, FakeQuant, Format, fp8
from spyglass.quant.packed import Packed, empty_packed
from spyglass.quant.tiles import tile

START = time.monotonic()
CHILDREN = 12
LIMIT = float(os.environ.get("LIMIT", "85"))
BANDWIDTH, FLOPS = 4.3e12, 685e12
HIDDEN, WIDTH, EXPERTS, CHOSEN = 4096, 2048, 256, 6
ROUNDING = FakeQuant(element="e4m3", block=128)
# rows -> goal and best other figure, in us or (2,048 rows and more) TFLOP/s
GOALS: dict[str, tuple[float, float]] = {
    "moe 1": (28, 32),
    "moe 2": (46, 52),
    "moe 4": (82, 89),
    "moe 8": (155, 161),
    "moe 32": (455, 469),
    "moe 128": (815, 845),
    "moe 2048": (400, 345),
    "moe 8192": (540, 483),
    "fp8 32768x1024 1": (9.5, 10.8),
    "fp8 32768x1024 8": (9.5, 10.9),
    "fp8 32768x1024 4096": (700, 747),
    "fp8 4096x8192 4096": (760, 817),
    "bf16 129280x4096 1": (330, 250),
}


@dataclass
class Case:
    """One shape, its bound and its launch configurations by name."""

    name: str
    rows: int
    bytes: float
    flops: float
    make: Callable[[bool], tuple[list[Callable[[Any], torch.Tensor]], Callable[[], torch.Tensor]]]
    launches: dict[str, Any] = field(default_factory=dict)


def stacks(device: str = "cuda") -> list[Packed]:
    """Random FP4 experts w1, w3, w2 of one layer."""
    found = []
    for out, inner in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)):
        weight = empty_packed(FP4, (EXPERTS, out, inner), device)
        assert weight.scale is not None
        weight.data.random_(0, 256)
        weight.scale.random_(117, 124)
        found.append(weight)
    return found


def tiled_stack(weight: Packed) -> Packed:
    """The stack in the order of the kernels, expert by expert."""
    found = replace(empty_packed(FP4, weight.shape, "cuda"), tiled=True)
    for expert in range(EXPERTS):
        one, place = tile(weight[expert]), found[expert]
        assert one.scale is not None and place.scale is not None
        place.data.copy_(one.data)
        place.scale.copy_(one.scale)
    return found


def matrix(format: Format, shape: tuple[int, int]) -> Packed:
    """A random weight."""
    weight = empty_packed(format, shape, "cuda")
    if format.name == "bf16":
        weight.data.normal_(std=shape[1] ** -0.5)
        return weight
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    codes[(codes & 127) == 127] = 0
    weight.data.view(torch.uint8).copy_(codes)
    assert weight.scale is not None
    weight.scale.random_(117, 124)
    return weight


def moe(rows: int, weights: list[Packed], tiled: list[Packed]) -> Case:
    """The routed experts of `rows` rows, uniform routing."""
    generator = torch.Generator().manual_seed(rows)
    sets = {1: 40, 2: 20, 4: 12, 8: 8, 32: 5, 128: 4}.get(rows, 1)
    order = torch.randperm(EXPERTS, generator=generator)
    ids = []
    for number in range(sets):
        if rows == 1:
            chosen = order[number * CHOSEN :][:CHOSEN][None]
        else:
            chosen = torch.rand(rows, EXPERTS, generator=generator).topk(CHOSEN, 1).indices
        ids.append(chosen.int())
    distinct = sum(len(one.unique()) for one in ids) / sets
    size = 3 * HIDDEN * WIDTH * 17 / 32

    def make(checked: bool) -> tuple[list[Callable[[Any], torch.Tensor]], Callable[[], torch.Tensor]]:
        x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        routing = torch.rand(rows, CHOSEN, device="cuda")
        places = [one.cuda() for one in ids]
        if checked and rows > 8:
            places[0] = places[0].clone()
            places[0][3] = -1
        calls = [
            lambda launch, one=one: experts.experts_grouped(
                x,
                one,
                routing,
                *(tiled if launch[1] else weights),
                limit=10.0,
                rounding=ROUNDING,
                launches=launch[0],
            )
            for one in places
        ]
        return calls, lambda: experts_reference.experts_grouped(
            x, places[0], routing, *weights, limit=10.0, rounding=ROUNDING
        )

    case = Case(f"moe {rows}", rows, distinct * size, 6 * rows * CHOSEN * HIDDEN * WIDTH, make)
    for name, up, down, in_tiles in moe_launches(rows):
        case.launches[name] = experts.Tuning(up=up, down=down), in_tiles
    return case


def moe_launches(rows: int) -> Iterator[tuple[str, Any, Any, bool]]:
    """Launch configurations of the experts: name, up, down, whether weights are tiled."""
    few, many = experts.Few, experts.Many
    if rows <= 128:
        plain = (2, 4, False), (4 if rows <= 2 else 1, 4, False)
        up, down = (4, 4, False) if rows <= 2 else (1, 4, False), plain[1]
        wanted = {(*plain, False), (up, down, True), (plain[0], down, True), ((1, 4, True), down, True)}
        wanted |= {((2, 4, True), down, True), (up, (2, 4, False), True), (up, (1, 4, True), True)}
        for (warps, steps, ahead), (warps_, steps_, ahead_), in_tiles in sorted(wanted):
            yield (
                f"{'tiled ' * in_tiles}up w{warps}{' ahead' * ahead}, down w{warps_}{' ahead' * ahead_}",
                few(warps=warps, steps=steps, ahead=ahead),
                few(warps=warps_, steps=steps_, ahead=ahead_),
                in_tiles,
            )
        return
    shapes: list[tuple[int, int, int, int, int, int | None]]
    shapes = [(128, 64, 8, 3, 1, None), (128, 64, 8, 2, 2, None), (64, 64, 4, 3, 1, None), (128, 128, 8, 2, 1, 128)]
    if rows > 2048:
        shapes += [(128, 256, 8, 2, 1, None), (256, 128, 8, 2, 1, None)]
    for number, (rows_, tokens, warps, stages, unrolled, registers) in enumerate(shapes):
        tile = many(rows=rows_, tokens=tokens, warps=warps, stages=stages, unrolled=unrolled, registers=registers)
        for in_tiles in (True, False) if number == 0 else (True,):
            yield (
                f"{'tiled ' * in_tiles}{rows_}x{tokens} w{warps} n{stages} u{unrolled} r{registers}",
                tile,
                tile,
                in_tiles,
            )


def dense(rows: int, format: Format, shape: tuple[int, int], copies: int) -> Case:
    """One matrix; `copies` of it in turn."""
    rounding = None if format.name == "bf16" else ROUNDING

    def make(checked: bool) -> tuple[list[Callable[[Any], torch.Tensor]], Callable[[], torch.Tensor]]:
        weights = [matrix(format, shape) for _ in range(1 if checked else copies)]
        x = torch.randn(rows, shape[1], device="cuda").bfloat16()
        calls = [
            lambda launch, weight=weight: linear.linear_block(x, weight, rounding=rounding, launch=launch)
            for weight in weights
        ]
        return calls, lambda: linear_reference.linear_block(x, weights[0], rounding=rounding)

    size = shape[0] * shape[1] * (2 if format.name == "bf16" else 1)
    case = Case(f"{format.name} {shape[0]}x{shape[1]} {rows}", rows, size, 2 * rows * shape[0] * shape[1], make)
    for name, launch in dense_launches(rows, format, shape):
        case.launches[name] = launch
    return case


def dense_launches(rows: int, format: Format, shape: tuple[int, int]) -> Iterator[tuple[str, Any]]:
    """Launch configurations of one matrix."""
    if rows <= 32:
        step = 32 if format.name == "bf16" else 64
        for warps, steps, ahead in ((1, 4, False), (1, 4, True), (2, 4, False), (8, 4, False), (8, 4, True)):
            if shape[1] % (warps * steps * step) == 0 and shape[0] * warps >= 16 * 400:
                yield f"w{warps} s{steps}{' ahead' * ahead}", linear.Few(warps=warps, steps=steps, ahead=ahead)
        if rows > 8:
            for warps, steps, ahead in ((2, 4, False), (4, 2, False)):
                yield (
                    f"32 rows w{warps} s{steps}{' ahead' * ahead}",
                    linear.Few(warps=warps, steps=steps, ahead=ahead, rows=32),
                )
            for tile in ((64, 32, 4, 4, 1), (64, 32, 4, 3, 2)) if format.name == "fp8" else ():
                yield (
                    f"{tile[0]}x{tile[1]} w{tile[2]} n{tile[3]} u{tile[4]}",
                    linear.Many(rows=tile[0], tokens=tile[1], warps=tile[2], stages=tile[3], unrolled=tile[4]),
                )
    else:
        shapes = ((64, 64, 4, 4, 1), (64, 128, 4, 4, 1), (64, 64, 4, 3, 2))
        if rows > 512:
            yield "expanded", None
            shapes = ((128, 128, 8, 3, 1), (128, 128, 8, 2, 2), (128, 256, 8, 2, 2))
        for rows_, tokens, warps, stages, unrolled in shapes:
            yield (
                f"{rows_}x{tokens} w{warps} n{stages} u{unrolled}",
                linear.Many(
                    rows=rows_,
                    tokens=tokens,
                    warps=warps,
                    stages=stages,
                    unrolled=unrolled,
                    registers=128 if rows_ == tokens == 128 else None,
                ),
            )


def cases(weights: list[Packed], tiled: list[Packed]) -> list[Case]:
    """All shapes, the most wanted first."""
    eight = fp8((128, 128))
    found = [moe(rows, weights, tiled) for rows in (1, 8, 32, 128, 2048, 8192, 4)]
    for rows in (1, 8, 32, 128):
        found += [dense(rows, eight, shape, 8) for shape in ((32768, 1024), (4096, 8192))]
    found += [dense(1, eight, shape, 24) for shape in ((1024, 4096), (4096, 2048))]
    found += [dense(4096, eight, shape, 2) for shape in ((32768, 1024), (4096, 8192))]
    found += [dense(1, BF16, shape, copies) for shape, copies in (((129280, 4096), 1), ((2048, 4096), 12))]
    return found


def timed(calls: list[Callable[[], Any]], repeats: int) -> float:
    """Microseconds a call, as replays of one graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    taken = []
    for _ in range(repeats):
        first.record()
        graph.replay()
        second.record()
        second.synchronize()
        taken.append(first.elapsed_time(second))
    return sorted(taken)[len(taken) // 2] * 1e3 / len(calls)


def checked(case: Case, launch: Any, expected: torch.Tensor | None) -> tuple[float, torch.Tensor]:
    """Relative error of one call with poisoned memory. Raises ValueError if it is wrong."""
    torch.manual_seed(case.rows)
    calls, reference = case.make(True)
    if expected is None:
        expected = reference().float()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is not written with NaN
    try:
        found = calls[0](launch).float()
    finally:
        torch.use_deterministic_algorithms(False)
    error = float((found - expected).norm() / expected.norm())
    if not error < 4e-3:
        wrong = (~torch.isfinite(found)).sum()
        raise ValueError(f"relative error {error:.3g}, {int(wrong)} values not finite")
    return error, expected


def child(number: int) -> None:
    """Compile every CHILDREN-th configuration by running it once."""
    weights = [empty_packed(FP4, shape, "cuda") for shape in ((EXPERTS, WIDTH, HIDDEN),) * 2]
    weights.append(empty_packed(FP4, (EXPERTS, HIDDEN, WIDTH), "cuda"))
    jobs = [
        (case, name)
        for case in cases(weights, [replace(weight, tiled=True) for weight in weights])
        for name in case.launches
    ]
    for case, name in jobs[number::CHILDREN]:
        try:
            case.make(True)[0][0](case.launches[name])
            torch.cuda.synchronize()
        except Exception as error:
            print(f"compile {case.name} [{name}]: {str(error)[:300]!r}", flush=True)
            if "CUDA error" in str(error):
                return


def main() -> None:
    """Compile, check, time, print, write."""
    torch.cuda.init()
    children = [
        subprocess.Popen([sys.executable, os.path.abspath(__file__), "--child", str(number)])
        for number in range(CHILDREN)
    ]
    weights = stacks()
    tiled = [tiled_stack(weight) for weight in weights]
    todo = cases(weights, tiled)
    for process in children:
        try:
            process.wait(timeout=max(1.0, 75 - (time.monotonic() - START)))
        except subprocess.TimeoutExpired:
            process.kill()
    print(f"compiled after {time.monotonic() - START:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for case in todo:
        expected = None
        for name, launch in case.launches.items():
            if time.monotonic() - START > LIMIT:
                break
            row: dict[str, Any] = {"case": case.name, "launch": name}
            try:
                row["error"], expected = checked(case, launch, expected)
                calls, _ = case.make(False)
                row["us"] = timed([partial(call, launch) for call in calls], 5 if case.rows > 128 else 15)
            except Exception as error:
                row["failed"] = str(error)[:400]
                print(f"FAILED {case.name} [{name}]: {row['failed'][:200]!r}", flush=True)
            rows.append(row)
        found = [row for row in rows if row["case"] == case.name and "us" in row]
        if found:
            best = min(found, key=lambda row: row["us"])
            best["kernels"] = apart(case, case.launches[best["launch"]])
    report(todo, rows)


def apart(case: Case, launch: Any) -> dict[str, float]:
    """Microseconds of each kernel of a call."""
    calls, _ = case.make(False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for call in calls:
            call(launch)
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profile.events():
        if event.device_time > 0:
            times[event.name[:40]] = times.get(event.name[:40], 0.0) + event.device_time / len(calls)
    return {name: round(us, 2) for name, us in times.items()}


def report(todo: list[Case], rows: list[dict[str, Any]]) -> None:
    """The best of each shape beside its bound, its goal and the best other figure; then all that was timed."""
    out = Path(os.environ.get("OUT", "."))
    name = torch.cuda.get_device_name()
    (out / "products.json").write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1))
    for case in todo:
        found = sorted((row for row in rows if row["case"] == case.name and "us" in row), key=lambda row: row["us"])
        for row in found:
            print(f"  {case.name} [{row['launch']}] {row['us']:.1f} us, error {row['error']:.1e}")
    print(f"{name}; {sum('failed' in row for row in rows)} failed; {time.monotonic() - START:.0f} s")
    for case in todo:
        found = sorted((row for row in rows if row["case"] == case.name and "us" in row), key=lambda row: row["us"])
        if not found:
            continue
        best, goal = found[0], GOALS.get(case.name)
        bound = max(case.bytes / BANDWIDTH, case.flops / FLOPS) * 1e6
        rate = (
            f"{case.flops / best['us'] / 1e6:.0f} TFLOP/s"
            if case.rows > 512
            else f"{case.bytes / best['us'] / 1e6:.2f} TB/s"
        )
        against = f"goal {goal[0]:g}, best other {goal[1]:g}" if goal else ""
        print(
            f"{case.name:22s} {best['us']:8.1f} us {rate:12s} share {bound / best['us']:.2f} {against} "
            f"[{best['launch']}]"
        )
        print("    " + ", ".join(f"{kernel} {us}" for kernel, us in best.get("kernels", {}).items()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(int(sys.argv[2]))
    else:
        main()
