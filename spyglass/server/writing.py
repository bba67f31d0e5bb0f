"""JSON bodies of any size, written in pieces: the interpreter may turn to other threads between them.

The library's fast writer makes a body in one call, during which no other thread runs; a body may have megabytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from spyglass.server.exchange import Call, Immediate

_LEVELS = 8  # choices, choice, logprobs, content, entry: what lies deeper is small
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """The value as compact JSON; half characters as question marks."""
    return "".join(_pieces(value, _LEVELS)).encode("utf-8", "replace")


def encoded(call: Call | Immediate) -> Call | Immediate:
    """The same, the body of an answer that is ready as bytes."""
    if not isinstance(call, Immediate):
        return call
    return replace(call, body={}, content=json_bytes(call.body))


def _pieces(value: Any, levels: int) -> Iterator[str]:
    if not levels or not isinstance(value, dict | list) or not value:
        yield _ENCODER.encode(value)
    elif isinstance(value, dict):
        for number, (key, inner) in enumerate(value.items()):
            yield f"{',' if number else '{'}{_ENCODER.encode(key)}:"
            yield from _pieces(inner, levels - 1)
        yield "}"
    else:
        for number, inner in enumerate(value):
            yield "," if number else "["
            yield from _pieces(inner, levels - 1)
        yield "]"
