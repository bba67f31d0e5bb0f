"""The body of a request: read no further than its limit, then JSON as the standard has it (RFC 8259), an object.

What Python's reader lets through is refused: NaN and Infinity, numbers too large to be finite, keys written twice, one
of which would be lost, lone surrogates, which no tokenizer can encode, and nesting without end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from spyglass.config.json_file import parse_json_text
from spyglass.errors import OverloadedError, PromptError, json_kind
from spyglass.server.limits import (
    BODY_BYTES_PER_SECOND,
    BODY_PAUSE_SECONDS,
    BODY_SECONDS,
    MAX_DEPTH,
    MAX_VALUES,
)
from spyglass.server.memory import Reservation

_FROM_CURL = ("application/x-www-form-urlencoded", "")
_OF_BROWSERS = ("origin", "referer", "sec-fetch-site", "sec-fetch-mode")  # a proxy may take one of them away
_CLOSE = {"connection": "close"}
_LARGE = 1 << 20  # bytes of a body whose values are counted before it is read


async def read_body(request: Request, limit: int, held: Reservation) -> bytes:
    """The body, at most `limit` bytes, which `held` has counted when it is here; else they are given back.

    Raises:
        OverloadedError: other requests leave no room for it.
        HTTPException: 413 too large, 415 not JSON by its headers, 408 not here in time.
        ClientDisconnect: the client went away.
    """
    _check_headers(request)
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > 2 * limit:
        raise _too_large(limit)
    reader = _Reader(limit, held)
    with ExitStack() as undo:
        undo.callback(held.release)
        try:
            async with asyncio.timeout(BODY_PAUSE_SECONDS) as clock:
                began = asyncio.get_running_loop().time()
                async for chunk in request.stream():
                    reader.add(chunk)
                    if reader.size > 2 * limit:
                        break
                    clock.reschedule(_deadline(began, asyncio.get_running_loop().time(), reader.size))
        except TimeoutError:
            raise HTTPException(408, "the body came too slowly; send it at once", _CLOSE) from None
        body = reader.body()
        undo.pop_all()
    return body


def _deadline(began: float, now: float, size: int) -> float:
    """When the next piece of a body must be here: pauses, its rate and the whole have bounds."""
    slowest = began + BODY_PAUSE_SECONDS + size / BODY_BYTES_PER_SECOND
    return min(now + BODY_PAUSE_SECONDS, slowest, began + BODY_SECONDS)


class _Reader:
    """Collects a body. One that is refused is read on for a while, or its sender would never see the answer."""

    def __init__(self, limit: int, held: Reservation) -> None:
        self.size = 0
        self._limit, self._held = limit, held
        self._chunks: list[bytes] = []
        self._refused: Exception | None = None

    def add(self, chunk: bytes) -> None:
        self.size += len(chunk)
        if self.size > self._limit:
            self._refuse(_too_large(self._limit))
        if self._refused is not None:
            return
        try:
            self._held.take(len(chunk))
        except OverloadedError as error:
            self._refuse(error)
        else:
            self._chunks.append(chunk)

    def body(self) -> bytes:
        if self._refused is not None:
            raise self._refused
        return b"".join(self._chunks)

    def _refuse(self, error: Exception) -> None:
        self._refused = error
        self._chunks.clear()
        self._held.release()


def parse_json(body: bytes, what: str = "the body") -> Mapping[str, Any]:
    """The JSON object of a body; `what` names it in errors.

    Raises:
        PromptError: it is none.
    """
    if len(body) > _LARGE:
        _refuse_many_values(body, what)
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{what} is not UTF-8: byte {body[error.start]:#04x} at {error.start}") from None
    try:
        value = parse_json_text(text)
    except RecursionError:
        raise PromptError(f"{what} is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise PromptError(f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise PromptError(f"{what} is {json_kind(value)}, expected a JSON object")
    _check_depth(value, what)
    if "\\ud" in text or "\\uD" in text:
        _check_surrogates(value, what)
    return value


def _refuse_many_values(body: bytes, what: str) -> None:
    """Raises PromptError before a reader makes objects of them; a few passes over the bytes."""
    if sum(map(body.count, (b",", b"[", b"{", b'"'))) <= MAX_VALUES:  # in texts and outside
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') <= 2 * MAX_VALUES:
        outside = b"".join(plain.split(b'"')[::2])  # of the texts
        if sum(map(outside.count, (b",", b"[", b"{"))) <= MAX_VALUES:
            return
    raise PromptError(f"{what} has more than {MAX_VALUES:,} values; send less")


def _check_headers(request: Request) -> None:
    """A page of another origin can send anything but JSON without asking first, so of a browser nothing else is read.

    What `curl -d` says of its bodies is taken from everybody else: Ollama's users write no header. Browsers tell where
    a page is from.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    browser = any(name in request.headers for name in _OF_BROWSERS)
    if media_type != "application/json" and (browser or media_type not in _FROM_CURL):
        found = f"is {media_type[:80]!r}" if media_type else "is missing"
        raise HTTPException(415, f"the content-type {found}; send application/json")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise HTTPException(415, f"the content-encoding is {encoding[:80]!r}; send the body as it is")


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than the {limit} bytes that it may have; send less", _CLOSE)


def _check_depth(value: object, what: str) -> None:
    """Breadth first, so that depth costs no stack."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise PromptError(f"{what} is nested more than {MAX_DEPTH} levels deep")


def _check_surrogates(value: object, what: str) -> None:
    """`json` makes a character of a pair of escapes; half a pair stays what no text may hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise PromptError(f"{what} holds half of a surrogate pair (\\ud800 to \\udfff), which is no text") from None
