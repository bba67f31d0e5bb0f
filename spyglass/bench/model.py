"""Decode and prefill of the `mini` model through the real step loop, against what the machine's memory allows.

The bound of decoding is bandwidth: every dense weight and every expert that some row chose is read once per step.
"share" is the measured rate over that bound, with the bandwidth of the best matrix-vector product measured here; the
share of a plain read of memory, which no product reaches, is printed too. The reference ops run as the baseline.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from spyglass.bench.load import resident
from spyglass.bench.machine import RESULTS, add_folder, announce, positive, save_numbers
from spyglass.checkpoint.random import new_checkpoint
from spyglass.checkpoint.safetensors import open_checkpoint
from spyglass.config.cache import CachePlan, cache_plans
from spyglass.config.engine import EngineConfig
from spyglass.config.presets import PRESETS, Preset
from spyglass.engine.engine import Engine
from spyglass.engine.request import SamplingParams
from spyglass.engram.feed import EngramFeed
from spyglass.engram.store import open_engram
from spyglass.model import LoadedModel, load_model
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.tokens import Prompt

WeightFormat = Literal["packed", "bf16"]
OpChoice = Literal["auto", "reference"]
BOTH: tuple[OpChoice, ...] = ("auto", "reference")
FORMATS: tuple[WeightFormat, ...] = ("bf16", "packed")
BATCHES = (1, 4)
CONTEXT = 128  # prompt tokens before decoding is timed
PROMPTS = (512, 2048, 6000)
BASELINE_PROMPTS = (512,)
BASELINE_STEPS = 2  # the reference decodes every weight anew in every step
PLAIN_READ = "plain read"
ATTENDED = ("window", "pool")  # rows that attention reads
CHOOSERS = (".indexer.wq_b", ".indexer.weights_proj")  # matrices that only serve a choice among compressed rows
MEMORY_PROMPTS = (2048, 8192, 32768)
OTHERS = {"decode, batch 1": 26.0, "decode, batch 4": 79.3, "prefill of 2,048": 876.0}  # best known at this size


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Tokens per second of all sequences together; `host_ms` of a step are spent outside the model's parts."""

    weights: WeightFormat
    ops: OpChoice
    batch: int
    tokens_per_second: float
    step_bytes: int
    bound: float
    share: float
    share_of_read: float
    host_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Prompt tokens per second, until the first token is there."""

    weights: WeightFormat
    ops: OpChoice
    tokens: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Resident bytes before a prompt runs, and the most while it runs."""

    weights: WeightFormat
    tokens: int
    model_bytes: int
    peak_bytes: int


def run(argv: Sequence[str]) -> int:
    """Print the tables; writes the checkpoints first if they are not there."""
    parser = argparse.ArgumentParser(prog="spyglass bench model", description=__doc__)
    add_folder(parser)
    parser.add_argument(
        "--preset", choices=PRESETS, default="mini", help="which random model (others were timed at mini)"
    )
    parser.add_argument("--weights", choices=FORMATS, nargs="*", default=list(FORMATS), help="formats to measure")
    parser.add_argument("--steps", type=positive, default=40, help="decode steps that are timed")
    parser.add_argument(
        "--prompts", type=positive, nargs="*", default=list(PROMPTS), help="prompt lengths of our prefill"
    )
    parser.add_argument("--no-baseline", action="store_true", help="leave the reference ops out")
    parser.add_argument("--memory", action="store_true", help="peak memory of long prompts, each in its own process")
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads")
    parser.add_argument("--save", action="store_true", help=f"write the numbers to {RESULTS}")
    args = parser.parse_args(argv)
    machine = announce(args.threads)
    bandwidths = measure_bandwidths()
    print(
        "  ".join(f"{name} {value / 1e9:.1f} GB/s" for name, value in bandwidths.items())
        + "; the bound takes the better GEMV"
    )
    print("best known elsewhere (tokens/s): " + ", ".join(f"{name} {value}" for name, value in OTHERS.items()))
    results: list[Decode | Prefill | Memory] = []
    for weights in args.weights:
        folder = checkpoint_folder(args.folder, args.preset, weights)
        for ops in BOTH[:1] if args.no_baseline else BOTH:
            lengths = args.prompts if ops == "auto" else [n for n in args.prompts if n in BASELINE_PROMPTS]
            results += measure(folder, weights, ops, steps=args.steps, lengths=lengths, bandwidths=bandwidths)
        if args.memory:
            results += [measure_memory(folder, weights, tokens, args.threads) for tokens in MEMORY_PROMPTS]
    if args.save:
        _save(machine, bandwidths, results)
    return 0


def measure(
    folder: Path,
    weights: WeightFormat,
    ops: OpChoice,
    *,
    steps: int,
    lengths: Sequence[int],
    bandwidths: Mapping[str, float],
) -> list[Decode | Prefill | Memory]:
    """Decode at every batch size and prefill at every length on one loaded model, printed as they come."""
    loaded = load_model(folder, dtype="bfloat16", images=False, ops=ops, progress=False)
    product = max(value for name, value in bandwidths.items() if name != PLAIN_READ)
    results: list[Decode | Prefill | Memory] = []
    for batch in BATCHES:
        rate, host = decode_rate(loaded, folder, batch, steps if ops == "auto" else BASELINE_STEPS)
        nbytes = step_bytes(folder, loaded, batch)
        bound = batch * product / nbytes
        decode = Decode(
            weights=weights,
            ops=ops,
            batch=batch,
            tokens_per_second=rate,
            step_bytes=nbytes,
            bound=bound,
            share=rate / bound,
            share_of_read=rate * nbytes / batch / bandwidths[PLAIN_READ],
            host_ms=host * 1e3,
        )
        print(
            f"{weights:>6} {ops:>9}  decode batch {batch}: {rate:8.1f} tok/s, {nbytes / batch / 1e6:6.0f} MB/token, "
            f"bound {bound:7.1f}, share {decode.share:4.0%} ({decode.share_of_read:.0%} of a plain read), "
            f"host {host * 1e3:.2f} ms/step",
            flush=True,
        )
        results.append(decode)
    for tokens in lengths:
        rate = prefill_rate(loaded, folder, tokens)
        print(f"{weights:>6} {ops:>9}  prefill {tokens:>6}: {rate:8.1f} tok/s", flush=True)
        results.append(Prefill(weights=weights, ops=ops, tokens=tokens, tokens_per_second=rate))
    return results


def decode_rate(loaded: LoadedModel, folder: Path, batch: int, steps: int) -> tuple[float, float]:
    """Tokens per second over `steps` decode steps, and seconds per step outside the model's parts."""
    engine = make_engine(loaded, folder)
    params = SamplingParams(temperature=0, max_tokens=steps + 8, ignore_eos=True)
    for number in range(batch):
        engine.add(make_prompt(loaded, CONTEXT, seed=number), params)
    sampled = 0
    while sampled < batch:  # until every prompt is in memory
        sampled = len(engine.step())
    for _ in range(3):
        engine.step()
    before = engine.step_runner.seconds
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds = time.perf_counter() - started
    return batch * steps / seconds, (seconds - engine.step_runner.seconds + before) / steps


def prefill_rate(loaded: LoadedModel, folder: Path, tokens: int) -> float:
    """Prompt tokens per second until the first token."""
    engine = make_engine(loaded, folder)
    engine.add(make_prompt(loaded, 16, seed=1), SamplingParams(max_tokens=2))
    _run_out(engine)
    engine.add(make_prompt(loaded, tokens, seed=2), SamplingParams(temperature=0, max_tokens=1))
    started = time.perf_counter()
    _run_out(engine)
    return tokens / (time.perf_counter() - started)


def measure_memory(folder: Path, weights: WeightFormat, tokens: int, threads: int) -> Memory:
    """Peak resident bytes of a prompt in a process of its own."""
    program = (
        "import sys, pathlib, spyglass.bench.model as m; m.report_memory(pathlib.Path(sys.argv[1]), *sys.argv[2:])"
    )
    command = [sys.executable, "-c", program, str(folder), str(tokens), str(threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    model_bytes, peak = (int(word) for word in done.stdout.split())
    print(f"{weights:>6}            memory of {tokens:>6} tokens: {peak - model_bytes:,} bytes above {model_bytes:,}")
    return Memory(weights=weights, tokens=tokens, model_bytes=model_bytes, peak_bytes=peak)


def report_memory(folder: Path, tokens: str, threads: str) -> None:
    """Run one prompt and print resident bytes before and at the peak; meant for a process of its own (Linux)."""
    torch.set_num_threads(int(threads))
    loaded = load_model(folder, dtype="bfloat16", images=False, progress=False)
    engine = make_engine(loaded, folder)
    prompt = make_prompt(loaded, int(tokens), seed=2)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
    before = resident("VmRSS")
    engine.add(prompt, SamplingParams(temperature=0, max_tokens=1))
    _run_out(engine)
    print(before, resident("VmHWM"))


def step_bytes(folder: Path, loaded: LoadedModel, batch: int) -> int:
    """Bytes that one decode step of `batch` rows reads: weights as stored, and rows of a context of CONTEXT tokens.

    Experts count by the expected number of distinct choices, E (1 - (1 - K / E) ** batch). In a context of that length
    all compressed rows are attended, so nothing of the indexer is read but what makes its keys.
    """
    text, dense, experts = loaded.config.text, 0, 0
    table_rows = 0 if text.engram is None else batch * text.engram.columns
    for name, tensor in open_checkpoint(folder).tensors.items():
        if not name.startswith(("layers.", "head.", "norm.", "hc_head")) or name.endswith("tid2eid"):
            continue
        if name.removesuffix(".weight").removesuffix(".scale").endswith(CHOOSERS):
            continue
        if ".engram.embed" in name:
            dense += table_rows * tensor.nbytes // tensor.shape[0]
        elif ".ffn.experts." in name:
            experts += tensor.nbytes
        else:
            dense += tensor.nbytes
    chosen = 1 - (1 - text.num_experts_per_tok / text.n_routed_experts) ** batch
    plans = [plan for plan in cache_plans(text, stored=loaded.stores_rows) if plan.kind in ATTENDED]
    rows = sum(plan.row_bytes(2) * attended_rows(plan) for plan in plans)
    return int(dense + experts * chosen + batch * rows)


def attended_rows(plan: CachePlan) -> int:
    """Rows of one tensor that a query behind CONTEXT tokens attends."""
    return min(CONTEXT, CONTEXT if plan.retention is None else plan.retention + 1) // plan.tokens_per_row


def measure_bandwidths(megabytes: int = 1024, rounds: int = 5) -> dict[str, float]:
    """Bytes per second of torch's matrix-vector products over more weights than any cache holds, and of a plain sum.

    Which of them comes near the memory's speed depends on the processor: torch has no fast bf16 product on many.
    """
    width = 4096
    count = megabytes * (1 << 20) // (4 * width * width)
    wide = [torch.randn(width, width) for _ in range(count)]
    half = [torch.randn(width, width).to(torch.bfloat16) for _ in range(2 * count)]
    flat = torch.ones(count * width * width)
    x = torch.randn(1, width)
    cases: dict[str, Callable[[], object]] = {
        "GEMV bf16": lambda: [torch.nn.functional.linear(x.to(torch.bfloat16), weight) for weight in half],
        "GEMV fp32": lambda: [torch.nn.functional.linear(x, weight) for weight in wide],
        PLAIN_READ: flat.sum,
    }
    return {name: flat.nbytes / best_seconds(case, rounds) for name, case in cases.items()}


def best_seconds(case: Callable[[], object], rounds: int) -> float:
    """The shortest of `rounds` runs."""
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        case()
        best = min(best, time.perf_counter() - started)
    return best


def checkpoint_folder(folder: Path, preset: Preset, weights: WeightFormat) -> Path:
    """The checkpoint of a preset and format, written if it is not there."""
    path = folder / f"{preset}-{weights}"
    if not (path / "config.json").exists():
        print(f"writing {path}", flush=True)
        new_checkpoint(path, preset, seed=0, format=weights)
    return path


def make_engine(loaded: LoadedModel, folder: Path) -> Engine:
    """An engine without the short position limit of `mini`, so that long prompts run too."""
    config = replace(loaded.config, text=replace(loaded.config.text, max_position_embeddings=1 << 20))
    engram = None
    if config.text.engram is not None:
        engram = EngramFeed(open_engram(folder, config), device=loaded.device, dtype=loaded.dtype)
    return Engine(
        loaded.model,
        config,
        EngineConfig(images=0),
        dtype=loaded.dtype,
        device=loaded.device,
        engram=engram,
        stored_rows=loaded.stores_rows,
    )


def _run_out(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def make_prompt(loaded: LoadedModel, tokens: int, seed: int) -> Prompt:
    """Random text."""
    ids = np.random.default_rng(seed).integers(1000, loaded.config.text.vocab_size - 1000, tokens)
    return prompt_from_parts([ids], loaded.config, placeholder=loaded.config.text.vocab_size - 1)


def _save(machine: dict[str, str], bandwidths: dict[str, float], results: Sequence[Decode | Prefill | Memory]) -> None:
    rows = [{"kind": type(result).__name__.lower(), **asdict(result)} for result in results]
    save_numbers("model", machine, {"bytes_per_second": bandwidths, "others": OTHERS, "results": rows})
