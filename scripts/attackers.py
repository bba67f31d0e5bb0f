"""Who attacks a server: bodies, images, connections and adapters.

Everything comes from a seed. `python -m scripts.attackers URL SEED SECONDS ROOT` makes its bodies first, since making
images costs more than sending them, says `ready`, waits for a line, attacks, and prints one JSON object: how often what
came of each kind, and what should not have happened. Traffic stays on loopback; a few connections at a time, each of
them ended.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from spyglass.config.shipped import find_model

ATTACKERS = 4  # connections at a time
BODIES_PER_SECOND, MOST_BODIES = 4, 600  # made beforehand; those of a long run are sent several times
RIGHT = {200, 400, 404, 408, 409, 413, 415, 422, 429, 503}
PATIENCE, LAST_SECONDS = 120.0, 10.0
LONG = {"text", "mutated"}  # some of these are honoured and ask for thousands of tokens
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PATHS = (
    CHAT,
    TEXT,
    "/v1/messages",
    "/v1/responses",
    "/tokenize",
    "/v1/messages/count_tokens",
    "/v1/responses/input_tokens",
    "/api/chat",
)
VALUES: Sequence[Any] = (
    *(
        None,
        True,
        -1,
        0,
        1,
        1 << 62,
        10**400,
        1e308,
        -1.5,
        "",
        "x",
        "\x00",
        "\u2028",
        "a" * 70_000,
        "\U0001f600" * 9000,
    ),
    *([], {}, [[]] * 500, [{}] * 5000, {"": {}}, [1] * 40_000, ["x"] * 5000, {str(n): n for n in range(20_000)}),
)


@dataclass(slots=True)
class Tally:
    """What came of what was tried; `slowest` is the longest refusal in seconds, behind its last byte, and `which` one
    it was. `spans`: when each was under way, by the monotonic clock, and what it was."""

    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: dict[str, float] = field(default_factory=dict)
    which: dict[str, str] = field(default_factory=dict)
    spans: list[tuple[float, float, str]] = field(default_factory=list)

    def took(self, kind: str, seconds: float, what: str = "") -> None:
        """Note a refusal."""
        if seconds > self.slowest.get(kind, 0.0):
            self.slowest[kind], self.which[kind] = seconds, what

    def print(self) -> None:
        """For whoever started the attackers."""
        told = {name: getattr(self, name) for name in ("seen", "slowest", "which", "spans")}
        print(json.dumps({**told, "wrong": self.wrong[:50]}))


def user(content: Any, **more: Any) -> dict[str, Any]:
    """A chat of one message."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **more}


def plain(source: random.Random, text: str) -> dict[str, Any]:
    """A sound body for every path, with what each wants."""
    return {**user(text), "prompt": text, "input": text, "model": "tiny", "max_output_tokens": 4}


def mutated(source: random.Random, value: Any, chance: float = 0.15) -> Any:
    """The same JSON with some values replaced, doubled or left out."""
    if source.random() < chance:
        return source.choice(VALUES)
    if isinstance(value, dict):
        return {key: mutated(source, inner, chance) for key, inner in value.items() if source.random() > chance / 3}
    if isinstance(value, list):
        found = [mutated(source, inner, chance) for inner in value]
        return found * source.randint(1, 50) if source.random() < chance / 3 else found
    return value


def damaged(source: random.Random, data: bytes) -> bytes:
    """The same bytes with a few changed, a piece left out, doubled or cut off."""
    out = bytearray(data)
    for _ in range(source.choice((1, 1, 3, 20))):
        if not out:
            break
        place, length = source.randrange(len(out)), source.choice((1, 4, 64, 1000))
        kind = source.randrange(4)
        if kind == 0:
            out[place : place + length] = source.randbytes(length)
        elif kind == 1:
            del out[place : place + length]
        elif kind == 2:
            out[place:place] = out[place : place + length] * source.choice((1, 30))
        elif source.random() < 0.3:
            del out[place:]
    return bytes(out)


def picture(source: random.Random) -> bytes:
    """An image file of any format, sound, damaged, or one that costs far more than its size."""
    kind = source.randrange(5)
    if kind == 0:
        return progressive(source.choice((64, 1024, 4096)), source.choice((1, 40, 200)))
    if kind == 1:
        return tiff(source.choice((16, 256, 20_000, 60_000)))
    size = source.choice(((1, 1), (40, 30), (8192, 1), (700, 500), (3000, 2000)))
    pixels = np.random.default_rng(source.randrange(1 << 30)).integers(0, 255, (size[1], size[0], 3), np.uint8)
    if kind == 2:
        pixels[:] = 7  # packs a thousandfold
    out = io.BytesIO()
    form = source.choice(("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"))
    Image.fromarray(pixels).save(out, form)
    return damaged(source, out.getvalue()) if source.random() < 0.7 else out.getvalue()


def progressive(side: int, scans: int) -> bytes:
    """A progressive JPEG with so many more scans of nothing (H2)."""
    out = io.BytesIO()
    Image.new("L", (side, side)).save(out, "JPEG", progressive=True)
    return out.getvalue()[:-2] + scans * b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x00\x00" + out.getvalue()[-2:]


def tiff(side: int) -> bytes:
    """A grey TIFF of 16 x 16 pixels with one tile of another size (H3)."""
    tags = {256: 16, 257: 16, 258: 8, 259: 1, 262: 1, 322: side, 323: side, 324: 300, 325: 256}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(1200)


def _grammar(source: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {f"p{n}": {"$ref": "#"} for n in range(200)}}
    forms: list[dict[str, Any]] = [
        {"guided_regex": "a?" * source.choice((300, 60_000))},
        {"guided_regex": "(a|b)*" * 50 + "c{1,500}"},
        {"guided_choice": [f"word {n}" for n in range(source.choice((3, 9000)))]},
        {"guided_json": schema},
        {"guided_grammar": "root ::= root root | 'a'"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": mutated(source, schema)}}},
    ]
    return user("x", **source.choice(forms))


def _counted(source: random.Random) -> tuple[str, Any]:
    """Small bodies that ask for much (H1, H12)."""
    return source.choice(
        [
            (TEXT, {"prompt": "a", "n": 64, "max_tokens": 300, "logprobs": 700, "ignore_eos": True}),
            (TEXT, {"prompt": [5] * 4000, "max_tokens": 1, "logprobs": 700, "echo": True}),
            (TEXT, {"prompt": ["a"] * 2000}),
            (CHAT, user("x", n=10**6)),
            (CHAT, user("x", logit_bias={str(n): 1 for n in range(100_000)})),
            (CHAT, user("x", stop=["a"] * 100_000)),
            (CHAT, user("x", logprobs=True, top_logprobs=20, max_tokens=10**6)),
            (CHAT, user("x", **{"n" * 1_000_000: 1})),
            (CHAT, user("x", tools=[{"type": "function", "function": {"name": f"f{n}"}} for n in range(3000)])),
        ]
    )


def _raw(source: random.Random) -> bytes:
    """Large or odd texts that should be JSON (H4, H5)."""
    count = source.choice((100, 20_000, 300_000))
    keys = ",".join(f'"{number}":0' for number in range(count))
    return source.choice(
        [
            lambda: f'{{{keys},"z":0,"z":0}}'.encode(),
            lambda: b'{"messages":[' + b"{}," * (10 * count) + b"{}]}",
            lambda: b'{"' + b"k" * (20 * count) + b'":1}',
            lambda: b'{"a":' * count + b"1" + b"}" * count,
            lambda: b"[" * count,
            lambda: b'{"messages":"' + b"\\ud800" * count + b'"}',
            lambda: b'{"n":' + b"9" * count + b"}",
            lambda: damaged(source, json.dumps(plain(source, "some words")).encode()),
        ]
    )()


def _long_text(source: random.Random) -> str:
    """Texts that tokenizers work hard at (H6)."""
    size = source.choice((1000, 50_000, 1_000_000))
    return source.choice(
        (" ", "a", "\n", "ab ", "漢字", "\u0301", "\U0001f600", "1234567890", "<｜User｜>", "\x00")
    ) * (size // source.choice((1, 3)))


def request(source: random.Random) -> tuple[str, str, bytes]:
    """One attack on the readers of bodies: its kind, path and content."""
    kind = source.choice(("mutated", "mutated", "raw", "counted", "text", "picture", "picture", "grammar"))
    path, body = source.choice(PATHS), None
    if kind == "raw":
        return kind, path, _raw(source)
    if kind == "mutated":
        body = mutated(source, plain(source, "some words"))
    elif kind == "counted":
        path, body = _counted(source)
    elif kind == "text":
        body = plain(source, _long_text(source))
    elif kind == "grammar":
        path, body = CHAT, _grammar(source)
    else:
        url = "data:image/png;base64," + base64.b64encode(picture(source)).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}] * source.choice((1, 1, 4))
        path, body = CHAT, user(parts)
    return kind, path, json.dumps(body).encode()


@dataclass(frozen=True, slots=True)
class Prepared:
    """An attack whose content lies in a file."""

    kind: str
    path: str
    file: Path


def prepare(seed: int, count: int, folder: Path) -> list[Prepared]:
    """So many different attacks on the readers of bodies."""
    found = []
    for number in range(count):
        kind, path, content = request(random.Random(f"{seed} body {number}"))
        file = folder / f"{number}"
        file.write_bytes(content)
        found.append(Prepared(kind, path, file))
    return found


def adapter(source: random.Random, folder: Path, like: Path) -> None:
    """A PEFT folder: one that is served, damaged, or with claims that no model has (H8)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((like / "adapter_config.json").read_text())
    raw = (like / "adapter_model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    kind = source.randrange(5)
    if kind == 0:
        config = mutated(source, config, 0.1)
    elif kind == 1:
        raw = raw[: 8 + length].replace(b"layers.", b"layers.9") + raw[8 + length :]
    elif kind == 2:
        raw = damaged(source, raw)
    elif kind == 3:
        entries = {
            f"layers.{n}.attn.x.lora_A.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
            for n in range(source.choice((10, 30_000)))
        }
        header = json.dumps(entries).encode()
        raw = struct.pack("<Q", len(header)) + header
    else:
        config["rank_pattern"] = {f".*{n}.*x" if n % 2 else f"layers.{n}": 3 for n in range(source.choice((10, 9000)))}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(raw)


class Attack:
    """Attacks on one server."""

    def __init__(self, url: str, root: Path, prepared: Sequence[Prepared]) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port, self._root, self._prepared = int(port), root, prepared
        self._like = next(path.parent for path in find_model("spyglass-tiny-v4").rglob("adapter_config.json"))
        self.tally = Tally()

    async def run(self, seed: int, seconds: float) -> None:
        """Several at a time, until the time is over."""
        until = time.monotonic() + seconds

        async def one(number: int) -> None:
            source = random.Random(f"{seed} {number}")
            while time.monotonic() < until:
                await self.attack(source, f"{number}")

        attackers = [asyncio.create_task(one(number)) for number in range(ATTACKERS)]
        await asyncio.wait(attackers, timeout=seconds + LAST_SECONDS)
        for attacker in attackers:
            self.tally.seen["not answered in the end"] += attacker.cancel()
        for outcome in await asyncio.gather(*attackers, return_exceptions=True):
            if isinstance(outcome, Exception):
                self.tally.wrong.append(f"an attacker failed: {outcome!r}")

    async def attack(self, source: random.Random, name: str) -> None:
        """One of them."""
        if source.random() < 0.08:
            folder = self._root / name
            adapter(source, folder, self._like)
            kind, path = "adapter", "/v1/load_lora_adapter"
            content = json.dumps({"lora_name": name, "lora_path": name}).encode()
        else:
            chosen = source.choice(self._prepared)
            kind, path, content = chosen.kind, chosen.path, chosen.file.read_bytes()
        manner = source.choice(("whole",) * 6 + ("leaves", "half", "half-closes", "does not read"))
        try:
            async with asyncio.timeout(PATIENCE):
                await self._send(kind, path, content, manner)
                if kind == "adapter":
                    unload = json.dumps({"lora_name": name}).encode()
                    await self._send(kind, "/v1/unload_lora_adapter", unload, "whole")
        except TimeoutError:
            self.tally.seen[f"{kind} still answered after {PATIENCE:.0f} s"] += 1
            if kind not in LONG:
                self.tally.wrong.append(f"{kind} {manner}: no answer in {PATIENCE:.0f} s: {content[:100]!r}")
        except OSError:
            self.tally.seen[f"{kind} hung up on"] += 1

    async def _send(self, kind: str, path: str, content: bytes, manner: str) -> None:
        # from another address than the well-behaved clients, where a machine has more than one of its own
        address = ("127.0.0.2", 0) if sys.platform == "linux" and self._host.startswith("127.") else None
        reader, writer = await asyncio.open_connection(self._host, self._port, local_addr=address)
        what, began = f"{kind} {manner} {path}, {len(content):,} bytes: {content[:60]!r}", time.monotonic()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        try:
            writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode())
            writer.write(content[: len(content) // 2] if manner == "half" else content)
            await writer.drain()
            sent = time.monotonic()
            if manner in ("leaves", "half"):
                await asyncio.sleep(0.05 if manner == "leaves" else 1.0)
                self.tally.seen[f"{kind} {manner}"] += 1
                return
            if manner == "half-closes":
                writer.write_eof()
            if manner == "does not read":
                await asyncio.sleep(0.5)
            answer = await reader.read()
            while answer.startswith(b"HTTP/1.1 102"):
                answer = answer.partition(b"\r\n\r\n")[2]
            self._judge(kind, path, content, answer)
            if answer[9:10] in (b"4", b"5") and manner != "does not read":  # it does not know when it was answered
                self.tally.took(kind, time.monotonic() - sent, what)
        finally:
            self.tally.spans.append((began, time.monotonic(), what))
            writer.close()

    def _judge(self, kind: str, path: str, content: bytes, answer: bytes) -> None:
        status = int(answer[9:12] or b"0")
        self.tally.seen[f"{kind} {status}"] += 1
        if status not in RIGHT:
            self.tally.wrong.append(f"{kind} {path} {content[:300]!r}: {answer[:300]!r}")


def main(argv: Sequence[str]) -> None:
    """Attack, and print what came of it."""
    url, seed, seconds, root = argv
    with tempfile.TemporaryDirectory() as made:
        count = min(MOST_BODIES, int(BODIES_PER_SECOND * float(seconds)))
        attack = Attack(url, Path(root), prepare(int(seed), count, Path(made)))
        print("ready", flush=True)
        sys.stdin.readline()
        asyncio.run(attack.run(int(seed), float(seconds)))
    attack.tally.print()


if __name__ == "__main__":
    main(sys.argv[1:])
