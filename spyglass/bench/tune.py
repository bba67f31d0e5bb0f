"""Which launch of each Triton kernel of the text path is quickest on this GPU, for the shapes of a preset.

Kernels are compiled side by side in other processes; each launch is compared with the one in use, then timed as replays
of a CUDA graph whose calls read other weights each. The best go into a table of this compute capability that launch
code reads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spyglass.bench.launch_choices import Work, works_of
from spyglass.bench.machine import describe_machine, positive
from spyglass.bench.shapes import META, calls_of
from spyglass.config.presets import PRESETS, config_of
from spyglass.ops import tuned
from spyglass.ops.launches import compile_kernels, recorded

GAIN = 1.03  # how much quicker a launch must be to take the place of the one in use
Timer = Callable[[Sequence[Callable[[], object]]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One launch of one call: microseconds of a call, or why it has none. `launch` None is the one in use."""

    work: Work
    launch: Any
    us: float | None = None
    failed: str = ""


def run(argv: Sequence[str]) -> int:
    """Print what is in use, the best and the gain for each shape, and write the table."""
    parser = argparse.ArgumentParser(prog="spyglass bench tune", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="flash-4layer", help="whose shapes")
    parser.add_argument("--rows", type=positive, nargs="+", choices=tuple(tuned.BUCKETS), default=[1, 8, 32, 128, 4096],
                        help="rows of a step; each stands for a bucket of sizes")  # fmt: skip
    parser.add_argument("--context", type=positive, default=8192, help="tokens before a decoded one")
    parser.add_argument("--seconds", type=positive, default=600, help="begin no trial after so many")
    parser.add_argument("--output", type=Path, help="write the table here instead of into the package")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here")
    started, properties = time.monotonic(), torch.cuda.get_device_properties(0)
    generation = 10 * properties.major + properties.minor
    works = works_of_preset(args.preset, args.rows, args.context, generation)
    compile_launches(works, generation, properties.multi_processor_count)
    print(f"{len(works)} shapes, compiled after {time.monotonic() - started:.0f} s", flush=True)
    device = torch.device("cuda")
    trials = tune(works, device, GraphTimer(), more=lambda: time.monotonic() - started < args.seconds)
    machine = describe_machine() | {"gpu": properties.name, "triton": _triton_version()}
    path = args.output or tuned.FOLDER / f"{generation}.json"
    table = make_table(trials, tuned.table(tuned.FOLDER, generation), machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print("\n".join(report(trials)))
    print(f"{properties.name}: {time.monotonic() - started:.0f} s; table written to {path}")
    return 0


def works_of_preset(preset: str, rows: Sequence[int], context: int, generation: int) -> list[Work]:
    """What can be chosen for a preset on a GPU of this compute capability."""
    calls = calls_of(config_of(preset), rows, context, generation)
    with recorded(generation):  # launch code asks which GPU there is
        return works_of(calls)


def compile_launches(works: Sequence[Work], generation: int, processors: int) -> None:
    """Compile all kernels of all launches; what does not compile is left to its trial, which says why."""
    with torch.inference_mode(), recorded(generation, processors) as kernels:
        for work in works:
            for launch in work.launches:
                work.run(launch, work.inputs(META)[0])
    compile_kernels(kernels, generation)


def tune(
    works: Sequence[Work], device: torch.device, timer: Timer, *, more: Callable[[], bool] = lambda: True
) -> list[Trial]:
    """Every launch of every work compared with the one in use and timed, until `more()` is False."""
    trials: list[Trial] = []
    for work in works:
        if not more():
            break
        with torch.inference_mode():
            inputs = work.inputs(device)
            expected: torch.Tensor | None = None
            for launch in work.launches:
                if not more():
                    break
                try:
                    found = work.run(launch, inputs[0])
                    expected = found if expected is None else expected
                    error = difference(found, expected)
                    if not error <= work.tolerance:
                        raise ValueError(f"differs by {error:.2g} from the launch in use")
                    us = timer([partial(work.run, launch, given) for given in inputs])
                except Exception as problem:  # whatever a compiler or a launch raises: the others are still wanted
                    trials.append(Trial(work=work, launch=launch, failed=f"{type(problem).__name__}: {problem}"[:200]))
                    if launch is None:
                        break
                else:
                    trials.append(Trial(work=work, launch=launch, us=us))
    return trials


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How far two results are apart: relative to the size of numbers, or the share of places that differ."""
    if not expected.dtype.is_floating_point:
        return float((found != expected).float().mean())
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def best_of(trials: Sequence[Trial], work: Work) -> tuple[Trial, Trial] | None:
    """The launch in use and the best of a work, which are the same unless another is well quicker."""
    timed = [trial for trial in trials if trial.work is work and trial.us is not None]
    if not timed or timed[0].launch is not None:
        return None
    now, best = timed[0], min(timed, key=lambda trial: trial.us or 0.0)
    assert now.us is not None and best.us is not None
    return now, best if best.us * GAIN < now.us else now


def make_table(trials: Sequence[Trial], before: Any, machine: dict[str, str]) -> dict[str, Any]:
    """The table of launches: what was better than the one in use, and what an earlier table says of the others."""
    launches = json.loads(json.dumps(before["launches"] if "launches" in before else {}))
    for work in dict.fromkeys(trial.work for trial in trials):
        found = best_of(trials, work)
        if found is not None and found[1].launch is not None:
            now, best = found
            row = {
                "launch": tuned.encode(best.launch),
                "us": round(best.us or 0, 2),
                "before_us": round(now.us or 0, 2),
            }
            launches.setdefault(work.table, {}).setdefault(work.shape, {})[str(work.rows)] = row
    return {**machine, "launches": launches}


def report(trials: Sequence[Trial]) -> list[str]:
    """A line for each work, what failed behind them."""
    lines = [f"{'call':76} {'rows':>5} {'now':>9} {'best':>9}  gain"]
    for work in dict.fromkeys(trial.work for trial in trials):
        found = best_of(trials, work)
        name = f"{work.table} {work.shape}"[:76]
        if found is None:
            lines.append(f"{name:76} {work.rows:>5} not measured")
            continue
        now, best = found
        assert now.us is not None and best.us is not None
        text = "" if best is now else f"  {json.dumps(tuned.encode(best.launch))}"
        lines.append(f"{name:76} {work.rows:>5} {now.us:9.1f} {best.us:9.1f} {now.us / best.us - 1:5.0%}{text}")
    for trial in trials:
        if trial.failed:
            launch = json.dumps(tuned.encode(trial.launch))
            lines.append(f"failed: {trial.work.table} {trial.work.rows} rows {launch}: {trial.failed}")
    return lines


class GraphTimer:
    """Microseconds of a call: the median of replays of one graph of all calls."""

    def __init__(self, replays: int = 7, least_calls: int = 8) -> None:
        self._replays, self._least_calls = replays, least_calls

    def __call__(self, calls: Sequence[Callable[[], object]]) -> float:
        calls = [calls[number % len(calls)] for number in range(max(len(calls), self._least_calls))]
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        taken = []
        for _ in range(self._replays):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            taken.append(start.elapsed_time(stop))
        return sorted(taken)[len(taken) // 2] * 1e3 / len(calls)


def _triton_version() -> str:
    import triton

    return str(triton.__version__)
