"""What the server itself does for each streamed token: an engine that says a token at once, real connections, no model.

CPU time of the event loop's thread (protocol, JSON, HTTP, sockets) and of the engine's thread (delivery), divided by
tokens. Clients are another process. The baseline, in the same run: a protocol that sends a fixed event per delta.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from spyglass.bench.machine import announce, positive, save_numbers
from spyglass.bench.stream_client import ask_all
from spyglass.config.fields import number
from spyglass.config.server import ServerConfig
from spyglass.config.shipped import default_model
from spyglass.engine.llm import LLM
from spyglass.engine.request import Delta, RequestOutput, SamplingParams, Usage
from spyglass.engine.sequence import Request
from spyglass.engine.shares import ANYBODY, Client
from spyglass.engine.stats import EngineStats
from spyglass.engine.worker import EngineWorker
from spyglass.lora.use import NO_ADAPTER, AdapterHandle
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.tokens import Prompt
from spyglass.server.app import create_app, served_by
from spyglass.server.exchange import Call, Fetch
from spyglass.server.protocols.endpoints import make_endpoints
from spyglass.server.protocols.fields import Fields
from spyglass.server.run import bind, make_server, serve

_WORDS = ("The ", "picture ", "shows ", "a ", "small ", "red ", "boat, ", "and ", "behind ", "it ")
_PLAIN = "/plain"


class InstantEngine:
    """Says one word for every request in each step, which takes `pause_s`."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._live: dict[int, tuple[Prompt, int, int]] = {}  # prompt, tokens wanted, tokens said
        self._next = 0

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._live))

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Request:
        return Request(prompt=prompt, params=params)

    def submit(self, request: Request, *, adapter: AdapterHandle = NO_ADAPTER, client: Client = ANYBODY) -> int:
        self._next += 1
        self._live[self._next] = request.prompt, request.params.max_tokens or 1, 0
        return self._next

    def step(self, deliver: Callable[[list[Delta]], object] | None = None) -> list[Delta]:
        time.sleep(self._pause_s)
        return [self._say(request) for request in list(self._live)]

    def abort(self, request_id: int) -> Delta | None:
        if request_id not in self._live:
            return None
        prompt, _, said = self._live[request_id]
        self._live[request_id] = prompt, said + 1, said
        return self._say(request_id)

    def _say(self, request: int) -> Delta:
        prompt, wanted, said = self._live[request]
        text, said = _WORDS[said % len(_WORDS)], said + 1
        if said < wanted:
            self._live[request] = prompt, wanted, said
            return Delta(request_id=request, text=text, token_ids=(5,))
        del self._live[request]
        output = RequestOutput(
            request_id=request,
            text="".join(_WORDS[number % len(_WORDS)] for number in range(said)),
            token_ids=(5,) * said,
            finish_reason="length",
            usage=Usage(prompt_tokens=len(prompt), image_tokens=0, completion_tokens=said),
        )
        return Delta(request_id=request, text=text, token_ids=(5,), finish_reason="length", output=output)


class _PlainReply:
    malformed_tool_call = False

    def __init__(self) -> None:
        self._tokens = 0

    def begin(self, request_id: str) -> bytes:
        return b""

    def push(self, index: int, delta: Delta) -> bytes:
        self._tokens += len(delta.token_ids)
        return b'data: {"choices":[{"delta":{"content":"word "}}]}\n\n'

    def end(self) -> bytes:
        return b'data: {"usage":{"completion_tokens":%d}}\n\n' % self._tokens

    def whole(self, request_id: str) -> tuple[int, Mapping[str, Any]]:
        return 200, {}


_FIELDS = Fields(read=frozenset({"max_tokens"}))


@dataclass(frozen=True, slots=True)
class _PlainEndpoint:
    prompt: Prompt
    path: str = _PLAIN
    fields: Fields = _FIELDS

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Call:
        params = SamplingParams(max_tokens=body["max_tokens"])
        return Call(model="plain", prompts=[self.prompt], params=[params], stream=True, reply=_PlainReply())

    def error(self, status: int, message: str, **more: str | None) -> Mapping[str, Any]:
        return {"error": {"message": message}}


def run(argv: Sequence[str]) -> int:
    """Measure and print; JSON with --output."""
    options = _parser().parse_args(argv)
    machine = announce()
    print(f"{options.streams} streams of {options.tokens} tokens, a step every {options.pause_ms:g} ms")
    llm = LLM(options.model, device="cpu")
    found = {}
    for name, path in (("fixed events", _PLAIN), ("chat completions", "/v1/chat/completions")):
        found[name] = _measure(llm, path, options.streams, options.tokens, options.pause_ms / 1e3)
        figures = "  ".join(f"{what} {value:.4f}" for what, value in found[name].items())
        print(f"{name:<18} {figures}")
    if options.output:
        save_numbers("stream", machine, found, options.output)
    return 0


def _measure(llm: LLM, path: str, streams: int, tokens: int, pause_s: float) -> dict[str, float]:
    """Milliseconds per token of both threads, and tokens per event: more than 1 where clients were late."""
    body = {
        "model": llm.name,
        "messages": [{"role": "user", "content": "What is this?"}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with _serving(llm, pause_s) as (url, clock), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as clients:
        clients.submit(ask_all, url + path, {**body, "max_tokens": 8}, 4).result()
        before = clock()
        tokens, events = clients.submit(ask_all, url + path, body, streams).result()
        after = clock()
    return {
        "event loop ms/token": 1e3 * (after[0] - before[0]) / tokens,
        "engine thread ms/token": 1e3 * (after[1] - before[1]) / tokens,
        "tokens/event": tokens / events,
    }


@contextmanager
def _serving(llm: LLM, pause_s: float) -> Iterator[tuple[str, Any]]:
    """The address, and a clock of CPU seconds of (event loop's thread, engine's thread)."""
    worker = EngineWorker(InstantEngine(pause_s), max_live=4096)
    config = ServerConfig(grace_seconds=0)
    endpoints = [_PlainEndpoint(prompt_from_parts([[5]], llm.config)), *make_endpoints(served_by(llm, config))]
    app = create_app(llm, config, worker=worker, endpoints=endpoints)
    server, listening = make_server(app, 0), bind("127.0.0.1", 0)
    listening.listen()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serving() -> None:
        loops.append(asyncio.get_running_loop())
        await serve(server, app, listening)

    thread = threading.Thread(target=lambda: asyncio.run(serving()), daemon=True)
    thread.start()

    def clock() -> tuple[float, float]:
        async def both() -> tuple[float, float]:
            engine: list[float] = []
            await worker.between_steps(lambda: engine.append(time.thread_time()))
            return time.thread_time(), engine[0]

        return asyncio.run_coroutine_threadsafe(both(), loops[0]).result()

    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", clock
    finally:
        server.should_exit = True
        thread.join()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spyglass bench stream", description=__doc__)
    parser.add_argument(
        "--model",
        default=default_model(),
        metavar="DIR",
        help=f"whose tokenizer (default: {default_model()})",
    )
    parser.add_argument("--streams", type=positive, default=32, metavar="N", help="at a time (default 32)")
    parser.add_argument("--tokens", type=positive, default=256, metavar="N", help="of each stream (default 256)")
    parser.add_argument("--pause-ms", type=number, default=25.0, metavar="MS", help="between steps (default 25)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the numbers as JSON")
    return parser
