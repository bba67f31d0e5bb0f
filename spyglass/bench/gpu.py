"""Decode and prefill of the text path on one CUDA GPU, against what its memory and its matrix units allow.

Weights are drawn, not read (`load="dummy"`). A layer's time is the difference between a model of eight layers and one
of four, so that embedding, head and sampling cancel out. The decode bound is the bytes a step must read (weights as
stored, each chosen expert once, attended rows) over the bandwidth of a plain read measured in the same run; the prefill
bound is its arithmetic over the rate of one large bf16 product measured in the same run.

With `--experts`, of those in host memory the bytes are read at the host's rate, after and before the GPU's layers, so
the times add; a prompt takes at least as long as their copies to the GPU, once a chunk. These rates are measured too.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import torch

from spyglass.bench.machine import RESULTS, announce, positive, save_numbers
from spyglass.bench.model import make_prompt
from spyglass.engine.llm import LLM
from spyglass.engine.request import SamplingParams
from spyglass.errors import SpyglassError
from spyglass.layers.build import held_tensors
from spyglass.layers.hosted import HostedExperts
from spyglass.layers.linear import Experts, GroupedLinear, Linear
from spyglass.placement import DecodeReads, StepRates


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement: milliseconds of a step (decode) or of a whole prompt (prefill), and its lower bound."""

    preset: str
    work: str
    rows: int
    context: int
    ms: float
    bound_ms: float
    tokens_per_second: float
    launches: int = 0


def run(argv: Sequence[str]) -> int:
    """Print a table per preset and the time of a layer; the reference ops run as a baseline with `--baseline`."""
    parser = argparse.ArgumentParser(prog="spyglass bench gpu", description=__doc__)
    parser.add_argument("--presets", nargs="+", default=["flash-4layer", "flash-8layer"], help="models, by preset")
    parser.add_argument("--batches", type=positive, nargs="*", default=[1, 8, 32, 128], help="sequences of a step")
    parser.add_argument("--context", type=positive, default=4096, help="tokens before decoding is timed")
    parser.add_argument("--prefill", type=positive, nargs="*", default=[4096], help="prompt lengths")
    parser.add_argument("--steps", type=positive, default=32, help="decode steps that are timed")
    parser.add_argument("--step-tokens", type=positive, default=4096, help="max_step_tokens of the engine")
    parser.add_argument("--experts", default="auto", help="where routed experts are, as `spyglass serve` takes it")
    parser.add_argument("--ops", choices=("auto", "reference"), default="auto", help="which ops run")
    parser.add_argument("--profile", type=positive, help="print this many kernels of a step by time")
    parser.add_argument("--output", type=Path, help=f"write the numbers here (default: below {RESULTS} with --save)")
    parser.add_argument("--save", action="store_true", help=f"write the numbers to {RESULTS}")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here")
    machine = announce(gpu=torch.cuda.get_device_name(), torch=torch.__version__)
    rates, flops = StepRates(device=read_bandwidth(), host=host_bandwidth()), product_rate()
    copies = copy_bandwidth()
    print(
        f"plain read {rates.device / 1e12:.2f} TB/s, of host memory {rates.host / 1e9:.0f} GB/s, copies from there "
        f"{copies / 1e9:.0f} GB/s, bf16 product {flops / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    rows: list[Row] = []
    for preset in args.presets:
        rows += measure(preset, args, rates, copies, flops)
    if len(args.presets) == 2:
        _print_layers(rows, args.presets)
    if args.save or args.output:
        numbers = {
            "read_TBs": rates.device / 1e12,
            "host_read_GBs": rates.host / 1e9,
            "copies_GBs": copies / 1e9,
            "bf16_TFLOPs": flops / 1e12,
            "rows": [asdict(row) for row in rows],
        }
        save_numbers("gpu", machine, numbers, args.output)
    return 0


def measure(preset: str, args: argparse.Namespace, rates: StepRates, copies: float, flops: float) -> list[Row]:
    """Every batch and prompt length of one preset."""
    started = time.perf_counter()
    llm = LLM(
        preset,
        device="cuda",
        images=0,
        ops=args.ops,
        load="dummy",
        experts=args.experts,
        max_step_tokens=args.step_tokens,
        max_sequences=max([1, *args.batches]),
        max_length=2 * max(args.context + args.steps, *args.prefill, 1024),
        prefix_cache_bytes=0,
    )
    host, weights = hosted(llm), weight_bytes(llm)
    print(
        f"{preset}: ready in {time.perf_counter() - started:.1f} s, {torch.cuda.memory_allocated() / 1e9:.1f} GB on "
        f"the GPU, experts of {len(host)} of {llm.config.text.num_hidden_layers} layers in host memory "
        f"({weights.host / 1e9:.1f} GB)",
        flush=True,
    )
    if llm.loaded.model.options.build.host is not None:
        print(llm.loaded.model.options.build.host.report, flush=True)
    rows: list[Row] = []
    for length in args.prefill:
        seconds = min(prefill_seconds(llm, length, seed) for seed in range(3))
        chunks = -(-length // args.step_tokens)
        bound = max(2 * active_weights(llm) * length / flops, chunks * weights.host / copies)
        rows.append(_row(preset, "prefill", length, length, seconds, bound, length / seconds))
    for batch in args.batches:
        seconds, launches = decode_seconds(llm, batch, args.context, args.steps, args.profile)
        bound = rates.seconds(*decode_bytes(llm, batch, args.context))
        rows.append(_row(preset, "decode", batch, args.context, seconds, bound, batch / seconds, launches))
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def decode_seconds(llm: LLM, batch: int, context: int, steps: int, profile: int | None) -> tuple[float, int]:
    """Seconds of a decode step of `batch` sequences behind `context` tokens, and kernels of one step."""
    params = SamplingParams(temperature=0, max_tokens=2 * steps + 64, ignore_eos=True)
    ids = [llm.engine.add(make_prompt(llm.loaded, context, seed=number), params) for number in range(batch)]
    seen: set[int] = set()
    while len(seen) < batch:
        seen |= {delta.request_id for delta in llm.engine.step() if delta.token_ids}
        if not llm.engine.has_work:
            raise SpyglassError(
                f"{len(seen)} of {batch} sequences began to answer, the others failed; see the log above"
            )
    for _ in range(8):
        llm.engine.step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        llm.engine.step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / steps
    launches = _profile_step(llm.engine.step, profile)
    for request_id in ids:
        llm.engine.abort(request_id)
    while llm.engine.has_work:
        llm.engine.step()
    return seconds, launches


def prefill_seconds(llm: LLM, tokens: int, seed: int) -> float:
    """Seconds from a prompt's arrival to its first token."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    llm.engine.add(make_prompt(llm.loaded, tokens, 1000 + seed), SamplingParams(temperature=0, max_tokens=1))
    while llm.engine.has_work:
        llm.engine.step()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _profile_step(step: Callable[[], object], top: int | None) -> int:
    """Kernels that one step runs; with `top`, the longest of them are printed by total time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    averages = recorded.key_averages()
    if top is not None:
        by_time = sorted(averages, key=lambda event: -event.self_device_time_total)[:top]
        total = sum(event.self_device_time_total for event in averages)
        print(f"  one step: {total / 1e3:.3f} ms on the GPU")
        for event in by_time:
            print(f"  {event.self_device_time_total:10.1f} us {event.count:5} x  {event.key[:96]}")
    return sum(event.count for event in averages)


def decode_bytes(llm: LLM, batch: int, context: int) -> tuple[float, float]:
    """Bytes that a decode step must read on the GPU and on the host."""
    return weight_bytes(llm).of_step(llm.config.text, batch, context)


def hosted(llm: LLM) -> list[HostedExperts]:
    """Layers' experts in host memory."""
    return [module for module in llm.loaded.model.text.modules() if isinstance(module, HostedExperts)]


def weight_bytes(llm: LLM) -> DecodeReads:
    """Of a model that is loaded."""
    model = llm.loaded.model
    stacks = [module for module in model.text.modules() if isinstance(module, Experts)]
    experts = sum(tensor.nbytes for stack in stacks for tensor in held_tensors(stack))
    host = sum(tensor.nbytes for stack in hosted(llm) for tensor in held_tensors(stack))
    total = sum(tensor.nbytes for part in (model.text, model.head) for tensor in held_tensors(part))
    return DecodeReads(dense=total - experts, experts=experts - host, host=host)


def active_weights(llm: LLM) -> float:
    """Weights that one token is multiplied with, the head left out (one row of a prompt reads it)."""
    text, count = llm.config.text, 0.0
    for module in llm.loaded.model.text.modules():
        if isinstance(module, Experts):
            share = text.num_experts_per_tok / text.n_routed_experts
            count += share * sum(prod(stack.shape) for stack in module.stacks.values())
        elif isinstance(module, (Linear, GroupedLinear)) and module.weight is not None:
            count += prod(module.weight.shape)
    return count


def read_bandwidth() -> float:
    """Bytes per second of a plain sum over 4 GiB."""
    data = torch.ones(1 << 30, device="cuda")
    return data.nbytes / _best_seconds(lambda: data.sum())


def host_bandwidth() -> float:
    """Bytes per second of a plain sum over 4 GiB of host memory, by as many threads as torch has."""
    data, best = torch.ones(1 << 30), float("inf")
    for _ in range(5):
        started = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - started)
    return data.nbytes / best


def copy_bandwidth() -> float:
    """Bytes per second of a copy of 1 GiB of locked host memory to the GPU."""
    data, to = torch.ones(1 << 28, pin_memory=True), torch.empty(1 << 28, device="cuda")
    return data.nbytes / _best_seconds(lambda: to.copy_(data, non_blocking=True))


def product_rate() -> float:
    """FLOP per second of a bf16 product of 8,192 cubed on random numbers."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / _best_seconds(lambda: a @ b)


def _best_seconds(work: Callable[[], object], rounds: int = 10) -> float:
    best = float("inf")
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / 1e3)
    return best


def _row(
    preset: str, work: str, rows: int, context: int, seconds: float, bound: float, rate: float, launches: int = 0
) -> Row:
    row = Row(
        preset=preset,
        work=work,
        rows=rows,
        context=context,
        ms=seconds * 1e3,
        bound_ms=bound * 1e3,
        tokens_per_second=rate,
        launches=launches,
    )
    print(
        f"{preset:>14} {work:>8} {rows:>6} rows, context {context:>7}: {row.ms:9.3f} ms, bound {row.bound_ms:7.3f} "
        f"({bound / seconds:4.0%}), {rate:10.1f} tok/s" + (f", {launches} kernels" if launches else ""),
        flush=True,
    )
    return row


def _print_layers(rows: Sequence[Row], presets: Sequence[str]) -> None:
    """Time of one layer from the difference of two models with the same ends."""
    small, large = presets
    extra = {"flash-4layer": 4, "flash-8layer": 8}
    if small not in extra or large not in extra:
        return
    layers = extra[large] - extra[small]
    for first in (row for row in rows if row.preset == small):
        for second in (row for row in rows if row.preset == large):
            if (first.work, first.rows, first.context) == (second.work, second.rows, second.context):
                ms, bound = (second.ms - first.ms) / layers, (second.bound_ms - first.bound_ms) / layers
                print(f"a layer, {first.work} {first.rows:>5} rows: {ms * 1e3:9.1f} us, bound {bound * 1e3:7.1f} us")
