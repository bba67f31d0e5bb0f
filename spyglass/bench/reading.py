"""Requests read in a process of their own against the same in this one: what that costs, and what it spares others.

`over` is what the way to the process and back adds: the median of the differences of runs in turn. `pause` is how long
another thread of this process, which wants to run every millisecond, waited at most meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from spyglass.bench.image import photograph
from spyglass.bench.machine import describe_machine, positive
from spyglass.config import read_model_config
from spyglass.config.shipped import find_model
from spyglass.prompt import open_image, plan_image
from spyglass.prompt.build import unpack_image
from spyglass.prompt.decode import CHAT_RULES, ImageLimits
from spyglass.prompt.tokenizer import load_tokenizer
from spyglass.server.body import parse_json
from spyglass.server.exchange import Served
from spyglass.server.protocols.chat import ChatEndpoint
from spyglass.server.workers import Job, Workers

_PATH = "/v1/chat/completions"
_IMAGES = {"720p": (1280, 720), "1080p": (1920, 1080), "12 MP": (4000, 3000)}
_BODIES = {"text, 4 kB": 4_000, "text, 32 kB": 32_000, "text, 1 MB": 1_000_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingTimes:
    """Medians of one request, milliseconds."""

    what: str
    here_ms: float
    there_ms: float
    over_ms: float
    pause_here_ms: float
    pause_there_ms: float


def run(argv: Sequence[str]) -> int:
    """Print the table (or JSON)."""
    parser = argparse.ArgumentParser(prog="spyglass bench reading", description=__doc__)
    parser.add_argument("--runs", type=positive, default=15, help="runs of each, the median counts (default 15)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    folder = find_model("spyglass-tiny-v4")
    config, tokenizer = read_model_config(folder), load_tokenizer(folder)
    served = Served(names=("x",), config=config, tokenizer=tokenizer, limits=ImageLimits(), max_length=1 << 20)
    workers, endpoint = Workers(served), ChatEndpoint(served)
    assert config.vision is not None
    rows = []
    for name, size in _IMAGES.items():
        file, plan = photograph(size), plan_image(*size, config.vision)
        rows.append(
            _measure(
                f"image, {name}",
                args.runs,
                lambda file=file, plan=plan: unpack_image(open_image(file), CHAT_RULES, plan, "it"),  # type: ignore[misc]
                lambda file=file, plan=plan: workers.unpack(file, CHAT_RULES, plan, "it"),  # type: ignore[misc]
            )
        )
    for name, nbytes in _BODIES.items():
        body = json.dumps({"messages": [{"role": "user", "content": "some words " * (nbytes // 11)}]}).encode()
        rows.append(
            _measure(
                name,
                args.runs,
                lambda body=body: endpoint.parse(parse_json(body), None),  # type: ignore[misc]
                lambda body=body: workers.read(_PATH, body, (), None, Job()),  # type: ignore[misc]
            )
        )
    workers.close()
    machine = describe_machine()
    if args.json:
        print(json.dumps({"machine": machine, "results": [asdict(row) for row in rows]}, indent=2))
    else:
        print(_as_text(machine, rows))
    return 0


def _measure(what: str, runs: int, here: Callable[[], object], there: Callable[[], object]) -> ReadingTimes:
    here(), there()
    times: list[tuple[float, float]] = []
    for _ in range(runs):
        both = []
        for work in (here, there):
            began = time.perf_counter()
            work()
            both.append(time.perf_counter() - began)
        times.append((both[0], both[1]))
    return ReadingTimes(
        what=what,
        here_ms=1e3 * statistics.median(one for one, _ in times),
        there_ms=1e3 * statistics.median(other for _, other in times),
        over_ms=1e3 * statistics.median(other - one for one, other in times),
        pause_here_ms=1e3 * longest_pause(here, runs),
        pause_there_ms=1e3 * longest_pause(there, runs),
    )


def longest_pause(work: Callable[[], object], runs: int) -> float:
    """Seconds that another thread waits at most while the work runs so many times."""
    longest, done = 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    thread = threading.Thread(target=tick)
    thread.start()
    for _ in range(runs):
        work()
    done.set()
    thread.join()
    return longest


def _as_text(machine: dict[str, str], rows: Sequence[ReadingTimes]) -> str:
    lines = [", ".join(f"{name} {value}" for name, value in machine.items()), "milliseconds"]
    lines.append(f"{'what':16}{'here':>9}{'there':>9}{'over':>8}{'pause here':>12}{'pause there':>13}")
    lines += [
        f"{row.what:16}{row.here_ms:9.2f}{row.there_ms:9.2f}{row.over_ms:8.2f}{row.pause_here_ms:12.1f}"
        f"{row.pause_there_ms:13.1f}"
        for row in rows
    ]
    return "\n".join(lines)
