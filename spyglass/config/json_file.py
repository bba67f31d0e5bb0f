"""JSON strictly (RFC 8259), from a text or a file: what Python's reader lets through or guesses about is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from spyglass.errors import ConfigError

MAX_BYTES = 16 << 20  # a config.json has a few kilobytes; anything near this is the wrong file
_DIGITS = 4300  # of an integer; Python makes no number of more


def read_json_object(path: Path) -> dict[str, object]:
    """The object in a UTF-8 JSON file.

    Raises:
        ConfigError: the file is missing, too large, not UTF-8, is not JSON (NaN and
            Infinity included), repeats a key, or holds something other than an object.
    """
    text = _read_text(path)
    try:
        value = parse_json_text(text)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply to be a configuration") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _read_text(path: Path) -> str:
    try:
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; a checkpoint folder needs a config.json")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(f"{path}: {size} bytes is too large for a configuration (at most {MAX_BYTES})")
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None


def parse_json_text(text: str) -> Any:
    """The value that a text holds.

    Raises:
        ValueError: not JSON, NaN and Infinity, a number too large, a key that one object has twice.
        RecursionError: nested deeper than there is stack.
    """
    return json.loads(
        text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_integer, object_pairs_hook=_unique
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number; write a finite one")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number is too large, it has more than {_DIGITS} digits")
    return int(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice[:100]!r} is written twice; keep one of the two values")
    return value
