"""The least HTTP client that measures a stream: one request on one connection, each event with its time of arrival."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass(slots=True)
class Answer:
    """One request as its client saw it; times in seconds of `time.perf_counter`. `status` 0 = the connection broke."""

    asked: float
    status: int = 0
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    usage: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Answer tokens, as the server counts them."""
        return int(self.usage.get("completion_tokens", 0))

    @property
    def first(self) -> float:
        """Seconds to the first piece of text."""
        return self.pieces[0] - self.asked

    @property
    def per_token(self) -> float:
        """Seconds from one token to the next, after the first."""
        return (self.ended - self.pieces[0]) / max(1, self.tokens - 1)


async def ask(url: str, body: Mapping[str, Any], key: str | None = None) -> Answer:
    """POST `body` (which asks for a stream with usage) to `url`; faults of the connection become `error`."""
    answer = Answer(asked=time.perf_counter())
    try:
        await _exchange(url, body, key, answer)
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        answer.error = repr(error)
    answer.ended = time.perf_counter()
    return answer


def ask_all(url: str, body: Mapping[str, Any], streams: int) -> tuple[int, int]:
    """Tokens and pieces of so many streams at once. For a process of its own; the first fault ends it."""

    async def every() -> tuple[int, int]:
        answers = await asyncio.gather(*(ask(url, body) for _ in range(streams)))
        failed = [answer for answer in answers if answer.error or answer.status != 200]
        if failed:
            raise SystemExit(f"a stream failed with status {failed[0].status}: {failed[0].error}")
        return sum(answer.tokens for answer in answers), sum(len(answer.pieces) for answer in answers)

    return asyncio.run(every())


async def _exchange(url: str, body: Mapping[str, Any], key: str | None, answer: Answer) -> None:
    place, payload = urlsplit(url), json.dumps(body).encode()
    assert place.hostname is not None
    reader, writer = await asyncio.open_connection(place.hostname, place.port or 80, limit=1 << 24)
    try:
        head = [f"POST {place.path} HTTP/1.1", f"host: {place.netloc}", "content-type: application/json"]
        head += [f"content-length: {len(payload)}", "connection: close"]
        head += [f"authorization: Bearer {key}"] if key else []
        writer.write("\r\n".join([*head, "", ""]).encode() + payload)
        await writer.drain()
        answer.status = int((await reader.readline()).split()[1])
        headers = [line async for line in _lines(reader)]
        chunked = any(line.lower() == b"transfer-encoding: chunked" for line in headers)
        if answer.status != 200:
            answer.error = (await reader.read()).decode(errors="replace")[:300]
            return
        held = b""
        while part := await (_chunk(reader) if chunked else reader.read(1 << 16)):
            now = time.perf_counter()
            *events, held = (held + part).split(b"\n\n")
            for event in events:
                _note(event, now, answer)
    finally:
        writer.close()


async def _lines(reader: asyncio.StreamReader) -> Any:
    while line := (await reader.readline()).strip():
        yield line


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readline()).split(b";")[0] or b"0", 16)
    part = await reader.readexactly(size)
    await reader.readexactly(2)
    return part


def _note(event: bytes, now: float, answer: Answer) -> None:
    data = event.strip().removeprefix(b"data:").strip()
    if not data.startswith(b"{"):  # a comment, or the closing [DONE]
        return
    value = json.loads(data)
    if "error" in value:
        answer.error = str(value["error"])[:300]
    answer.usage = value.get("usage") or answer.usage
    for choice in value.get("choices", ()):
        text = choice["delta"].get("content") or choice["delta"].get("reasoning_content")
        if text:
            answer.text += text
            answer.pieces.append(now)
