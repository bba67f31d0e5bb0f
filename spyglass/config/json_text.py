"""JSON strictly (RFC 8259): what Python's reader lets through or guesses about is refused in words."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

_DIGITS = 4300  # of an integer; Python makes no number of more


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
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{twice[:100]!r} is written twice; keep one of the two values")
    return value
