"""Mixed load on a live server of its own process: every protocol, whole requests of programs, pictures, forms, people
who leave, files that lie.

`python -m scripts.soak --seconds 600`. Each answer is known beforehand (temperature 0, asked alone), so a lost or
crossed one shows. At the end nothing is under way, memory is where it was, `/health` says 200, and SIGTERM ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
from PIL import Image

from spyglass.checkpoint.random import new_checkpoint
from tests.server.parts import data_url
from tests.server.test_client_shapes import CHAT, COMPLETIONS, MESSAGES, RESPONSES, SHAPES

CLIENTS = 12
NICE = ("nice", "-n", "2")
PATIENCE = 180.0  # seconds for one answer: a busy machine is given a minute for a grammar that takes too long
MOST_BODY = 300_000
MOST_GROWTH = 64 << 20  # bytes of memory that a server may hold more than after its first third
WORDS = ("red", "blue", "seven", "circle", "under", "behind", "ship", "left", "count", "big", "word", "lamp")
FORM = {
    "type": "object",
    "properties": {"n": {"enum": ["one", "two"]}},
    "required": ["n"],
    "additionalProperties": False,
}
SERVER = (
    *("--port", "0", "--device", "cpu", "--dtype", "float32", "--numerics", "plain", "--threads", "1"),
    *("--max-sequences", "8", "--max-waiting", "16", "--grace-seconds", "5", "--model-name", "tiny"),
    *("--max-body-bytes", str(MOST_BODY), "--cache-bytes", str(150 << 20), "--log-level", "error"),
    *(
        "--prefix-cache-bytes",
        str(32 << 20),
        "--image-cache-bytes",
        str(1 << 20),
    ),  # full early, so that growth is a leak
)


@dataclass(frozen=True, slots=True)
class Question:
    """One request that can be asked again and again; `read` takes its answer out of events or of a whole body.

    `streams`: whether it may be asked for in a stream.
    """

    path: str
    body: Mapping[str, Any]
    read: Callable[[Sequence[Mapping[str, Any]]], str]
    streams: bool = True


@dataclass(slots=True)
class Tally:
    """What has happened, and what should not have."""

    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def blame(self, what: str, question: object, answer: object) -> None:
        self.wrong.append(f"{what}: {str(question)[:300]} -> {str(answer)[:300]}")


def chat_text(items: Sequence[Mapping[str, Any]]) -> str:
    """Of Chat Completions and Completions: the answers one after another."""
    found: dict[int, str] = {}
    for item in items:
        for choice in item.get("choices", ()):
            said = choice.get("delta") or choice.get("message") or choice
            told = "".join(said.get(name) or "" for name in ("reasoning_content", "content", "text"))
            told += "".join(call["function"].get("arguments") or "" for call in said.get("tool_calls") or ())
            found[choice["index"]] = found.get(choice["index"], "") + told
    return "|".join(found[index] for index in sorted(found))


def message_text(items: Sequence[Mapping[str, Any]]) -> str:
    """Of Messages."""
    parts = [item["delta"] for item in items if item.get("type") == "content_block_delta"]
    parts += [part for item in items for part in item.get("content", ())]
    return "".join(part.get("thinking") or part.get("text") or "" for part in parts)


def response_text(items: Sequence[Mapping[str, Any]]) -> str:
    """Of Responses."""
    parts = [item["delta"] for item in items if item.get("type") == "response.output_text.delta"]
    if not parts:
        outputs = [part for item in items for part in item.get("output", ()) if part["type"] == "message"]
        parts = [part["text"] for output in outputs for part in output["content"]]
    return "".join(parts)


def questions(seed: int, count: int) -> list[Question]:
    """Different ones over all protocols; a third with a picture."""
    source = random.Random(seed)
    pictures = [data_url(Image.new("RGB", size, colour)) for size, colour in (((60, 40), "red"), ((90, 200), "blue"))]
    return [_question(number, source, pictures) for number in range(count)]


def _question(number: int, source: random.Random, pictures: Sequence[str]) -> Question:
    text = f"{number}: " + " ".join(source.choices(WORDS, k=source.randint(3, 60)))
    picture = source.choice(pictures) if number % 3 == 0 else None
    limit = source.randint(4, 24)
    kind = number % 6
    if kind == 0:
        parts = [{"type": "text", "text": text}]
        parts += [{"type": "image_url", "image_url": {"url": picture}}] if picture else []  # type: ignore[dict-item]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": limit, "n": 1 + number % 2}
        return Question("/v1/chat/completions", {"temperature": 0, **body}, chat_text)
    if kind == 1:
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if picture:
            data = {"type": "base64", "media_type": "image/png", "data": picture.partition(",")[2]}
            content.append({"type": "image", "source": data})
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": limit}
        return Question("/v1/messages", {"temperature": 0, "model": "tiny", **body}, message_text)
    if kind == 2:
        content = [{"type": "input_text", "text": text}]
        content += [{"type": "input_image", "image_url": picture, "detail": "auto"}] if picture else []
        given = [{"role": "user", "content": content}]
        body = {"input": given, "max_output_tokens": limit, "temperature": 0, "model": "tiny"}
        return Question("/v1/responses", body, response_text)
    if kind == 3:
        return Question("/v1/completions", {"prompt": text, "max_tokens": limit, "temperature": 0}, chat_text)
    if kind == 4:
        return _of_a_program(list(SHAPES)[number // 6 % len(SHAPES)], text, limit)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}
    body = {"messages": [{"role": "user", "content": text}], "response_format": form, "max_tokens": 40}
    return Question("/v1/chat/completions", {"temperature": 0, **body}, chat_text)


_READ = {CHAT: chat_text, COMPLETIONS: chat_text, RESPONSES: response_text, MESSAGES: message_text}
_LIMIT = {RESPONSES: "max_output_tokens", CHAT: "max_completion_tokens"}


def _of_a_program(name: str, text: str, limit: int) -> Question:
    """The whole request of a program, at the end of which stands the text."""
    path, shape, _ = SHAPES[name]
    body = {**shape, "temperature": 0, _LIMIT.get(path, "max_tokens"): limit}
    if path == COMPLETIONS:
        body["prompt"] = body["prompt"] + text if isinstance(body["prompt"], str) else [text]
    else:
        history = "input" if path == RESPONSES else "messages"
        body[history] = [*body[history], {"role": "user", "content": text}]
    return Question(path, body, _READ[path], streams=not body.get("echo"))


def rude(source: random.Random) -> tuple[str, dict[str, Any], tuple[int, ...]]:
    """A request that must be refused: path, what to send, and the statuses that are right."""
    ask = "/v1/chat/completions"
    picture = data_url()

    def image(url: str) -> dict[str, Any]:
        content = [{"type": "image_url", "image_url": {"url": url}}]
        return {"json": {"messages": [{"role": "user", "content": content}], "max_tokens": 2}}

    json_type = {"content-type": "application/json"}
    if source.random() < 0.01:  # rarely, since each takes seconds of a processor; 503 where there is too little of it
        slow = {"messages": [{"role": "user", "content": "x"}], "guided_regex": "a?" * 65_000}
        return ask, {"json": slow}, (400, 503)
    return source.choice(
        [
            (ask, image(picture[: len(picture) // 2]), (400,)),
            (ask, image("data:image/png;base64,aGVsbG8="), (400,)),
            (ask, image("http://127.0.0.1/x.png"), (400,)),
            (ask, image(data_url(Image.new("L", (8200, 4)))), (400,)),
            (ask, {"content": b" " * (MOST_BODY + 1000), "headers": json_type}, (413,)),
            (ask, {"content": b" " * (10 * MOST_BODY), "headers": json_type}, (413,)),
            (ask, {"content": b'{"messages": [', "headers": json_type}, (400,)),
            (ask, {"content": b'{"x":' * 3000, "headers": json_type}, (400,)),
            (ask, {"json": {"messages": [], "model": "gpt-9"}}, (400, 404)),
            (ask, {"json": {"messages": [{"role": "user", "content": "x"}], "max_tokens": -7}}, (400,)),
            (ask, {"json": {"messages": [{"role": "user", "content": "x " * 30_000}], "max_tokens": 1}}, (400,)),
            ("/v1/messages", {"json": {"messages": "x", "max_tokens": 1}}, (400,)),
            ("/v1/responses", {"json": {"input": [{"role": "nobody"}]}}, (400,)),
            ("/v1/completions", {"json": {"prompt": [10**9]}}, (400,)),
            ("/v1/nothing", {"json": {}}, (404,)),
            (ask, {"content": b"x=1", "headers": {"content-type": "text/plain"}}, (415,)),
        ]
    )


class Load:
    """Clients against one server."""

    def __init__(self, client: httpx.AsyncClient, expected: Mapping[int, str], asked: Sequence[Question]) -> None:
        self._client, self._expected, self._asked = client, expected, asked
        self.tally = Tally()

    async def visit(self, source: random.Random) -> None:
        """One thing that a client does."""
        number = source.randrange(len(self._asked))
        chance = source.random()
        if chance < 0.15:
            await self._be_rude(source)
        elif chance < 0.35:
            await self._leave(self._asked[number], source)
        else:
            await self._ask(number, stream=chance < 0.75)

    async def _ask(self, number: int, *, stream: bool) -> None:
        question = self._asked[number]
        stream = stream and question.streams
        answer = await self._client.post(question.path, json={**question.body, "stream": stream})
        if answer.status_code == 429:
            self.tally.seen["429"] += 1
            await asyncio.sleep(0.05)
            return
        if answer.status_code != 200:
            self.tally.blame("refused", question, answer.text)
            return
        text = question.read(read(answer.text, stream=stream))
        self.tally.seen["stream" if stream else "whole"] += 1
        if text != self._expected[number]:
            self.tally.blame(f"not {self._expected[number]!r}", question, answer.text)

    async def _leave(self, question: Question, source: random.Random) -> None:
        """Go away at some time, with or without having read something."""
        stream = question.streams and source.random() < 0.7
        body = {**question.body, "stream": stream}
        try:
            async with asyncio.timeout(source.uniform(0.001, 0.1)):
                async with self._client.stream("POST", question.path, json=body) as answer:
                    async for _ in answer.aiter_raw():
                        await asyncio.sleep(source.uniform(0, 0.03))
        except TimeoutError:
            self.tally.seen["left"] += 1

    async def _be_rude(self, source: random.Random) -> None:
        path, request, right = rude(source)
        try:
            answer = await self._client.post(path, **request)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            self.tally.seen["hung up on"] += 1
            return
        self.tally.seen[str(answer.status_code)] += 1
        if answer.status_code not in (*right, 429):
            self.tally.blame(f"status {answer.status_code}, not {right}", f"{path} {str(request)[:200]}", answer.text)


def read(text: str, *, stream: bool) -> list[Any]:
    """JSON of the events, or the one body."""
    if not stream:
        return [json.loads(text)]
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def memory(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@asynccontextmanager
async def beside(module: str, *argv: str) -> AsyncIterator[Callable[[], asyncio.Task[bytes]]]:
    """A program of ours that has said it is ready; the call that lets it run gives what it prints in the end."""
    command = (*NICE, sys.executable, "-m", module, *argv)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    running: list[asyncio.Task[bytes]] = []

    async def result() -> bytes:
        out, _ = await process.communicate(b"go\n")
        assert process.returncode == 0, f"{module}: it ended with {process.returncode}"
        return out

    def run() -> asyncio.Task[bytes]:
        running.append(asyncio.create_task(result()))
        return running[0]

    try:
        assert await process.stdout.readline() == b"ready\n", f"{module}: it could not begin"
        yield run
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.gather(*running, return_exceptions=True)


@asynccontextmanager
async def serving(
    folder: Path, options: Sequence[str] = SERVER
) -> AsyncIterator[tuple[subprocess.Popen[str], httpx.AsyncClient]]:
    """`spyglass serve` in a process of its own; it must end well."""
    command = [sys.executable, "-m", "spyglass.cli.main", "serve", str(folder), *options]
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(command, stderr=told, text=True)
        try:
            url = await _address(process, told)
            limits = httpx.Limits(max_connections=4 * CLIENTS)
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
                while (await client.get("/health")).status_code != 200:
                    await asyncio.sleep(0.05)
                yield process, client
            process.send_signal(signal.SIGTERM)
            code = process.wait(15)
            assert code in (0, -signal.SIGTERM), code
        finally:
            process.kill()
        told.seek(0)
        faults = [line for line in told if "Traceback" in line or '"level": "error"' in line]
        assert not faults, faults[:3]


async def _address(process: subprocess.Popen[str], told: Any) -> str:
    for _ in range(600):
        await asyncio.sleep(0.1)
        assert process.poll() is None, "the server did not start"
        told.seek(0)
        found = re.search(r"http://[\d.]+:\d+", told.read())
        if found:
            return found[0]
    raise AssertionError("the server did not say where it listens")


async def soak(
    folder: Path, seconds: float, seed: int = 0, count: int = 6 * len(SHAPES), *, attacked: bool = False
) -> tuple[Tally, list[int]]:
    """Load for so long; what happened, and the server's memory over time (12 samples). `attacked`: with attackers
    (`scripts.attackers`) among the clients."""
    asked = questions(seed, count)
    async with AsyncExitStack() as others:
        root = others.enter_context(tempfile.TemporaryDirectory())
        loading = ("--allow-adapter-loading", "--adapter-root", root) if attacked else ()
        process, client = await others.enter_async_context(serving(folder, (*SERVER, *loading)))
        expected = {}
        for number, question in enumerate(asked):
            answer = await client.post(question.path, json={**question.body, "stream": False})
            assert answer.status_code == 200, answer.text
            expected[number] = question.read(read(answer.text, stream=False))
        assert len(set(expected.values())) > count // 2, "answers must differ, or crossed ones would not show"
        load = Load(client, expected, asked)
        until = 0.0
        samples: list[int] = []

        async def visitor(number: int) -> None:
            source = random.Random(f"{seed} {number}")
            while time.monotonic() < until:
                await load.visit(source)

        async def watch() -> None:
            for _ in range(12):
                await asyncio.sleep(seconds / 12)
                samples.append(memory(process.pid))

        if attacked:
            argv = str(client.base_url).rstrip("/"), str(seed), str(seconds), root
            attackers = (await others.enter_async_context(beside("scripts.attackers", *argv)))()
        until = time.monotonic() + seconds
        await asyncio.gather(watch(), *(visitor(number) for number in range(CLIENTS)))
        if attacked:
            told = json.loads(await attackers)
            load.tally.seen["attacks"] = sum(told["seen"].values())
            load.tally.wrong += told["wrong"]
        await _settle(client, load.tally)
    return load.tally, samples


async def _settle(client: httpx.AsyncClient, tally: Tally) -> None:
    """Within a second nothing may be under way, and the server is well."""
    await asyncio.sleep(1.0)
    numbers = (await client.get("/metrics")).text
    for name in ("spyglass:num_requests_in_flight", "vllm:num_requests_running", "spyglass:failed_steps_total"):
        found = re.search(rf"^{name}{{.*}} (\S+)$", numbers, re.MULTILINE)
        if found is None or float(found[1]) != 0:
            tally.wrong.append(f"{name} is {found and found[1]} at the end")
    health = await client.get("/health")
    if health.status_code != 200:
        tally.wrong.append(f"/health: {health.text}")


def growth(samples: Sequence[int]) -> int:
    """Bytes between the largest of the second quarter and the end."""
    return samples[-1] - max(samples[len(samples) // 4 : len(samples) // 2])


def main() -> int:
    """The long form, by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attackers", action="store_true", help="attackers among the clients")
    parser.add_argument("--model", help="checkpoint folder (default: a new tiny one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(args.model or Path(made) / "tiny")
        if args.model is None:
            new_checkpoint(folder, "tiny", seed=0)
        tally, samples = asyncio.run(soak(folder, args.seconds, args.seed, attacked=args.attackers))
    print("seen:", dict(tally.seen))
    print("memory, MiB:", [sample >> 20 for sample in samples])
    print("| what | found | may be |\n|---|---|---|")
    print(f"| answers that are lost, crossed or wrong, and what is left behind | {len(tally.wrong)} | 0 |")
    print(f"| memory that grows, MiB | {growth(samples) >> 20} | {MOST_GROWTH >> 20} |")
    for wrong in tally.wrong[:20]:
        print("WRONG", wrong)
    return 1 if tally.wrong or growth(samples) > MOST_GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
