"""A server under load: many clients with texts and images; times to first token, per token, and throughput.

Closed loop: each client asks again as soon as it has its answer. Open loop: requests come at a rate whatever the server
does, which is what shows queues. The baseline runs first, in the same run: the same prompts through `LLM.generate` in
one process, no HTTP; what the server adds is the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from spyglass.bench.machine import announce, positive, save_numbers
from spyglass.bench.stream_client import Answer, ask
from spyglass.config.fields import integer, number
from spyglass.config.shipped import default_model

_START_SECONDS = 600
_WORDS = ("what", "is", "in", "the", "picture", "and", "how", "many", "red", "blue", "things", "are", "there", "now")
_SHARES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked: `requests` in all, a share of them with an image; answers have exactly `max_tokens` tokens."""

    requests: int
    clients: int
    rate: float | None
    words: int
    images: float
    max_tokens: int
    seed: int


def run(argv: Sequence[str]) -> int:
    """Measure and print; JSON with --output, an image with --plot."""
    options = _parser().parse_args(argv)
    load = Load(
        requests=options.requests,
        clients=options.clients,
        rate=options.rate,
        words=options.words,
        images=options.images,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    bodies = list(make_bodies(load))
    machine = announce()
    print(f"{load.requests} requests, {_shape(load)}, {load.images:.0%} with an image, {load.max_tokens} tokens each")
    baseline = None
    if options.url is None and not options.no_baseline:
        baseline = _baseline(options.model, bodies)
        print(f"baseline, LLM.generate of all of them at once: {baseline:.1f} tokens/s")
    with _server(options.url, options.model) as url:
        asyncio.run(_warm(url, bodies, options.key))
        start = time.perf_counter()
        answers = asyncio.run(_drive(url, bodies, load, options.key))
        seconds = time.perf_counter() - start
    summary = summarise(answers, seconds)
    for line in _report(summary, baseline):
        print(line)
    if options.output:
        kept = {"load": asdict(load), "baseline_tokens_per_second": baseline, **summary}
        save_numbers("serve", machine, kept, options.output)
    if options.plot:
        _plot(options.plot, answers, load)
    return 0 if not summary["failed"] else 1


def make_bodies(load: Load) -> Iterator[dict[str, Any]]:
    """Chat Completions bodies, all different, the same for the same seed."""
    dice = random.Random(load.seed)
    pixels = np.random.default_rng(load.seed)
    for turn in range(load.requests):
        text = f"{turn}: " + " ".join(dice.choice(_WORDS) for _ in range(load.words))
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if dice.random() < load.images:
            content.insert(0, {"type": "image_url", "image_url": {"url": _image(pixels)}})
        yield {
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": load.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def summarise(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Percentiles over the answers that came, in milliseconds; rates over the whole time."""
    good = [a for a in answers if a.status == 200 and a.error is None and a.pieces]
    tokens = sum(answer.tokens for answer in good)
    return {
        "seconds": seconds,
        "answered": len(good),
        "failed": len(answers) - len(good),
        "errors": sorted({f"{a.status}: {a.error}" for a in answers if a not in good})[:5],
        "tokens_per_second": tokens / seconds,
        "requests_per_second": len(good) / seconds,
        "ttft_ms": _percentiles([answer.first * 1e3 for answer in good]),
        "tpot_ms": _percentiles([answer.per_token * 1e3 for answer in good]),
        "e2e_ms": _percentiles([(answer.ended - answer.asked) * 1e3 for answer in good]),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"p{share}": float(np.percentile(values, share)) for share in _SHARES}


def _report(summary: Mapping[str, Any], baseline: float | None) -> Iterator[str]:
    yield (
        f"answered {summary['answered']}, failed {summary['failed']} in {summary['seconds']:.1f} s: "
        f"{summary['tokens_per_second']:.1f} tokens/s, {summary['requests_per_second']:.2f} requests/s"
    )
    if baseline is not None:
        yield f"share of the baseline: {summary['tokens_per_second'] / baseline:.2f}"
    for name, what in (("ttft_ms", "first token"), ("tpot_ms", "per token"), ("e2e_ms", "whole answer")):
        if summary[name]:
            shown = "  ".join(f"{share} {value:.1f} ms" for share, value in summary[name].items())
            yield f"{what:<13} {shown}"
    if summary["ttft_ms"]:
        yield f"first token, p99 over p50: {summary['ttft_ms']['p99'] / summary['ttft_ms']['p50']:.2f}"
    yield from summary["errors"]


async def _warm(url: str, bodies: Sequence[Mapping[str, Any]], key: str | None) -> None:
    for body in bodies[:2]:
        await ask(url, {**body, "max_tokens": 2, "messages": [{"role": "user", "content": "warm up"}]}, key)


async def _drive(url: str, bodies: Sequence[Mapping[str, Any]], load: Load, key: str | None) -> list[Answer]:
    if load.rate is not None:
        return await _open_loop(url, bodies, load, load.rate, key)
    waiting = iter(bodies)

    async def client() -> list[Answer]:
        return [await ask(url, body, key) for body in waiting]

    parts = await asyncio.gather(*(client() for _ in range(load.clients)))
    return [answer for part in parts for answer in part]


async def _open_loop(
    url: str, bodies: Sequence[Mapping[str, Any]], load: Load, rate: float, key: str | None
) -> list[Answer]:
    """Arrivals of a Poisson process."""
    dice, tasks = random.Random(load.seed + 1), []
    for body in bodies:
        tasks.append(asyncio.create_task(ask(url, body, key)))
        await asyncio.sleep(dice.expovariate(rate))
    return list(await asyncio.gather(*tasks))


def _baseline(model: str, bodies: Sequence[Mapping[str, Any]]) -> float:
    """Answer tokens per second of the same conversations in one process."""
    from spyglass.engine import LLM, SamplingParams

    llm = LLM(model)
    params = [SamplingParams(temperature=0, max_tokens=body["max_tokens"], ignore_eos=True) for body in bodies]
    conversations = [body["messages"] for body in bodies]
    llm.chat(conversations[:1], params[:1])
    start = time.perf_counter()
    outputs = llm.chat(conversations, params)
    seconds = time.perf_counter() - start
    return sum(output.usage.completion_tokens for output in outputs) / seconds


@contextmanager
def _server(url: str | None, model: str) -> Iterator[str]:
    """The address to ask: the one given, or that of a server of our own for as long as it is needed."""
    if url is not None:
        yield url.rstrip("/") + "/v1/chat/completions"
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "spyglass.cli.main", "serve", model, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}/v1/chat/completions"
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    stop = time.monotonic() + _START_SECONDS
    while time.monotonic() < stop:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with code {process.returncode} before it was ready; start it by hand")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"the server was not ready after {_START_SECONDS} s")


def _image(pixels: np.random.Generator) -> str:
    """A small image of its own, as a data URL: no two requests share it, so no cache answers for the tower."""
    buffer = io.BytesIO()
    low = pixels.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    Image.fromarray(low).resize((320, 240), Image.Resampling.BICUBIC).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _shape(load: Load) -> str:
    return f"{load.clients} clients, closed loop" if load.rate is None else f"open loop, {load.rate:g} a second"


def _plot(path: Path, answers: Sequence[Answer], load: Load) -> None:
    """Shares of requests by time to first token and by time per token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = [answer for answer in answers if answer.pieces]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    series = {"to the first token": [a.first for a in good], "per token": [a.per_token for a in good]}
    for axis, (name, values) in zip(axes, series.items(), strict=True):
        axis.plot(np.sort(values) * 1e3, np.linspace(0, 1, len(values)))
        axis.set(xlabel=f"milliseconds {name}", ylabel="share of requests", xlim=(0, None), ylim=(0, 1))
        axis.grid(alpha=0.3)
    figure.suptitle(f"{len(good)} answers, {_shape(load)}, {load.images:.0%} with an image")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spyglass bench serve", description=__doc__)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--model",
        default=default_model(),
        metavar="DIR",
        help=f"serve this checkpoint (default: {default_model()})",
    )
    where.add_argument("--url", metavar="URL", help="ask a server that runs already, without a baseline")
    parser.add_argument("--key", help="API key of that server")
    parser.add_argument("--requests", type=positive, default=128, metavar="N", help="requests in all (default 128)")
    parser.add_argument("--clients", type=positive, default=64, metavar="N", help="closed loop: at a time (default 64)")
    parser.add_argument("--rate", type=number, metavar="R", help="open loop: arrivals a second, instead of clients")
    parser.add_argument("--words", type=positive, default=40, metavar="N", help="words of a question (default 40)")
    parser.add_argument(
        "--images", "--pictures", type=number, default=0.25, metavar="S", help="share with an image (default 0.25)"
    )
    parser.add_argument("--max-tokens", type=positive, default=32, metavar="N", help="tokens of an answer (default 32)")
    parser.add_argument("--seed", type=integer, default=0, metavar="N", help="the same seed asks the same (default 0)")
    parser.add_argument("--no-baseline", action="store_true", help="leave out the run without a server")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the distributions (needs matplotlib)")
    return parser
