"""Many requests at once through the step loop: what a step costs besides the model, and how near the machine's bound.

"host" is the time of a decode step outside the model's parts and sampling. The bound is a roofline: a decode step of R
rows takes at least the longer of two times, and both are printed.

- Memory: every weight that the step needs once (of the experts those that some row is expected to choose) and every
  row that attention reads, at the rate of the best matrix-vector product measured here. Logits are not counted: all
  rows are greedy, so only the largest is wanted, and that needs no memory. Nor is the indexer, which has nothing to
  choose while all rows may be attended, nor what is written.
- Arithmetic: every weight matrix times every row (of the experts those that a row chooses) and the two products of
  attention, at the rate of the best large product measured here, bf16 or fp32, torch's or ours.

The baseline is one request at a time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from spyglass.bench.machine import RESULTS, add_folder, announce, positive, save_numbers
from spyglass.bench.model import (
    ATTENDED,
    CHOOSERS,
    CONTEXT,
    PLAIN_READ,
    WeightFormat,
    attended_rows,
    best_seconds,
    checkpoint_folder,
    make_engine,
    make_prompt,
    measure_bandwidths,
    step_bytes,
)
from spyglass.config.cache import cache_plans
from spyglass.config.presets import PRESETS
from spyglass.engine.request import SamplingParams
from spyglass.model import LoadedModel, load_model
from spyglass.ops.table import bind_ops
from spyglass.quant.formats import BF16
from spyglass.quant.packed import Packed

WARM = 8  # decode steps that are not timed: what a step is recorded for happens once


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Decoding of `requests` at once. Bounds are tokens per second, `bound` the lower; times are medians of a step."""

    preset: str
    requests: int
    tokens_per_second: float
    step_ms: float
    host_ms: float
    sampling_ms: float
    memory_bound: float
    arithmetic_bound: float
    bound: float
    bound_by: str
    share: float


def run(argv: Sequence[str]) -> int:
    """Print a line per preset and number of requests; writes the checkpoints first if they are not there."""
    parser = argparse.ArgumentParser(prog="spyglass bench engine", description=__doc__)
    add_folder(parser)
    parser.add_argument("--presets", choices=PRESETS, nargs="*", default=["tiny", "mini"], help="random models to run")
    parser.add_argument("--requests", type=positive, nargs="*", default=[1, 32], help="how many at once")
    parser.add_argument("--steps", type=positive, default=60, help="decode steps that are timed")
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads")
    parser.add_argument("--save", action="store_true", help=f"write the numbers to {RESULTS}")
    args = parser.parse_args(argv)
    machine = announce(args.threads)
    bandwidth = max(rate for name, rate in measure_bandwidths().items() if name != PLAIN_READ)
    multiplications = measure_products()
    print(f"{bandwidth / 1e9:.1f} GB/s, {multiplications / 1e9:.0f} G multiply-adds/s")
    results = []
    for preset in args.presets:
        weights: WeightFormat = "packed"
        folder = checkpoint_folder(args.folder, preset, weights)
        loaded = load_model(folder, dtype="bfloat16", images=False, progress=False)
        for requests in args.requests:
            bounds = {
                "memory": requests * bandwidth / step_bytes(folder, loaded, requests),
                "arithmetic": requests * multiplications / step_products(loaded, requests),
            }
            results.append(measure(loaded, folder, preset, requests, args.steps, bounds))
            print(_line(results[-1]), flush=True)
    if args.save:
        save_numbers("engine", machine, {"results": [asdict(result) for result in results]})
    return 0


def measure(
    loaded: LoadedModel, folder: Path, preset: str, requests: int, steps: int, bounds: Mapping[str, float]
) -> Load:
    """Decode `requests` prompts of CONTEXT tokens together; `bounds` in tokens per second, by what sets it."""
    engine = make_engine(loaded, folder)
    params = SamplingParams(temperature=0, max_tokens=steps + WARM + 8, ignore_eos=True)
    for number in range(requests):
        engine.add(make_prompt(loaded, CONTEXT, seed=number), params)
    while len(engine.step()) < requests:  # until every prompt is in memory
        pass
    for _ in range(WARM):
        engine.step()
    times: list[tuple[float, float, float]] = []
    for _ in range(steps):
        before, in_model = engine.stats(), engine.step_runner.seconds
        started = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - started
        sampling = engine.stats().sampling_seconds - before.sampling_seconds
        times.append((seconds, sampling, seconds - (engine.step_runner.seconds - in_model) - sampling))
    step, sampling, host = (statistics.median(column) for column in zip(*times, strict=True))
    bound_by = min(bounds, key=bounds.__getitem__)
    bound = bounds[bound_by]
    rate = requests * steps / sum(seconds for seconds, _, _ in times)
    return Load(
        preset=preset,
        requests=requests,
        tokens_per_second=rate,
        step_ms=step * 1e3,
        host_ms=host * 1e3,
        sampling_ms=sampling * 1e3,
        memory_bound=bounds["memory"],
        arithmetic_bound=bounds["arithmetic"],
        bound=bound,
        bound_by=bound_by,
        share=rate / bound,
    )


def step_products(loaded: LoadedModel, requests: int) -> float:
    """Multiply-adds of one decode step in a context of CONTEXT tokens, as the module counts them."""
    text = loaded.config.text
    dense = experts = 0
    for slot in loaded.model.slots():
        if slot.kind != "matrix" or slot.name == "embed" or slot.name.startswith(("vision.", "aligner.")):
            continue
        if slot.name.endswith(CHOOSERS):
            continue
        if ".ffn.experts." in slot.name:
            experts += math.prod(slot.shape)
        else:
            dense += math.prod(slot.shape)
    attended = sum(attended_rows(plan) for plan in cache_plans(text) if plan.kind in ATTENDED)
    keys_and_values = 2 * text.num_attention_heads * text.head_dim * attended
    return requests * (dense + keys_and_values + experts * text.num_experts_per_tok / text.n_routed_experts)


def measure_products(width: int = 2048, rows: int = 512, rounds: int = 20) -> float:
    """Multiply-adds per second of the best large product: torch's in bf16 and fp32, and ours in bf16."""
    ours = bind_ops("cpu", "bfloat16").linear_block
    best = 0.0
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = torch.randn(rows, width).to(dtype), torch.randn(width, width).to(dtype)
        cases: list[Callable[[], object]] = [partial(torch.nn.functional.linear, x, weight)]
        if dtype == torch.bfloat16:
            cases.append(partial(ours, x, Packed(BF16, weight, None, (width, width))))
        best = max(best, *(rows * width**2 / best_seconds(case, rounds) for case in cases))
    return best


def _line(load: Load) -> str:
    return (
        f"{load.preset:>6}  {load.requests:>3} at once: {load.tokens_per_second:8.1f} tok/s, memory allows "
        f"{load.memory_bound:.0f}, arithmetic {load.arithmetic_bound:.0f}: {load.share:4.0%} of what {load.bound_by} "
        f"allows; a step {load.step_ms:.2f} ms, of it sampling "
        f"{load.sampling_ms:.2f}, host {load.host_ms:.2f}"
    )
