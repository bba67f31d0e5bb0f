"""Typed reading of a JSON object's fields, and of numbers that a person wrote.

A refusal names the file, the field, what it holds and what was expected.

A JSON null counts as absent. `bool` is never an integer here, and an integral float is not one either.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from spyglass.errors import ConfigError

MAX_INTEGER = 2**31 - 1
_LEAST_NORMAL, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of float32, in which models are computed
# Python's own readers also take "1_0", " 1", "+1" and digits of other scripts: slips or tricks, where a number belongs.
_INTEGER = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"-?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SHOWN = 80  # characters of an offending value that a message repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """A JSON object that knows where it came from.

    `written` maps our names to the names of this file's dialect (absent = the same). `seen` collects the names that
    were asked for, in the file's spelling, so that the rest can be kept as informational.
    """

    file: str
    values: Mapping[str, object]
    prefix: str = ""
    written: Mapping[str, str] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def spelling(self, name: str) -> str:
        """The field's name as this file writes it."""
        return self.written.get(name, name)

    def get(self, name: str) -> object:
        """The raw value, None when absent or null."""
        key = self.spelling(name)
        self.seen.add(key)
        return self.values.get(key)

    def error(self, name: str, expected: str) -> ConfigError:
        """The refusal of a field, to be raised."""
        key = self.spelling(name)
        where = f"{self.file}: {self.prefix}{key}"
        if key not in self.values:
            return ConfigError(f"{where} is missing; expected {expected}")
        shown = json.dumps(self.values[key], ensure_ascii=False)
        shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
        return ConfigError(f"{where} is {shown}, expected {expected}")

    def integer(
        self, name: str, *, default: int | None = None, low: int = 1, high: int = MAX_INTEGER, limit: str = ""
    ) -> int:
        """An integer in [low, high]; required when no default is given. `limit` names the field that sets a bound."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not _is_integer(value) or not low <= value <= high:
            raise self.error(name, self._integer_span(low, high, limit))
        return value

    def optional_integer(self, name: str, *, low: int = 0, high: int = MAX_INTEGER, limit: str = "") -> int | None:
        """An integer in [low, high], or None when absent."""
        return None if self.get(name) is None else self.integer(name, low=low, high=high, limit=limit)

    def number(
        self,
        name: str,
        *,
        default: float | None = None,
        above: float = 0.0,
        low: float | None = None,
        limit: str = "",
    ) -> float:
        """A float32 number greater than `above`, and at least `low` if given; required when no default is given."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        number = _as_float(value)
        if number is None or number <= above or (low is not None and number < low):
            bound = f"of at least {low:g}" if low is not None else f"above {above:g}"
            raise self.error(name, f"a float32 number {bound}{self._because(limit)}")
        return number

    def optional_number(self, name: str, *, low: float) -> float | None:
        """A float32 number of at least `low`, or None when absent."""
        return None if self.get(name) is None else self.number(name, low=low)

    def integers(self, name: str, *, low: int = 0) -> tuple[int, ...]:
        """A list of integers, each at least `low`; required."""
        value = self.get(name)
        if not isinstance(value, list) or not all(_is_integer(item) and low <= item <= MAX_INTEGER for item in value):
            raise self.error(name, f"a list of integers of at least {low}")
        return tuple(value)

    def words(self, name: str, count: int, allowed: tuple[str, ...], *, limit: str) -> list[str]:
        """A list of `count` words (as many as field `limit` says), each one of `allowed`; required."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) != count or not all(word in allowed for word in value):
            raise self.error(name, f"{self.spelling(limit)} = {count} words, each {' or '.join(map(repr, allowed))}")
        return value

    def choice(self, name: str, allowed: tuple[str, ...], *, default: str | None = None) -> str:
        """One of a few strings; required when no default is given."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value not in allowed:
            raise self.error(name, " or ".join(repr(word) for word in allowed))
        return value

    def optional_choice(self, name: str, allowed: tuple[str, ...]) -> str | None:
        """One of a few strings, or None when absent."""
        return None if self.get(name) is None else self.choice(name, allowed)

    def fixed(self, name: str, value: str | float | bool) -> None:
        """Refuse anything but `value`, the only thing implemented; absent is fine."""
        got = self.get(name)
        same_kind = isinstance(got, bool) == isinstance(value, bool)
        if got is not None and not (same_kind and got == value):
            raise self.error(name, f"{value!r}; nothing else is implemented")

    def section(self, name: str, *, written: Mapping[str, str] | None = None) -> Fields:
        value = self.get(name)
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(
            file=self.file, values=value, prefix=f"{self.prefix}{self.spelling(name)}.", written=written or {}
        )

    def _integer_span(self, low: int, high: int, limit: str) -> str:
        span = f"of at least {low}" if high == MAX_INTEGER else f"from {low} to {high}"
        return f"an integer {span}{self._because(limit)}"

    def _because(self, limit: str) -> str:
        return f" (because of {self.prefix}{self.spelling(limit)})" if limit else ""

    def refuse_unseen(self) -> None:
        """Refuse fields that were not read: in this object, an unknown field may change what is computed."""
        for key in self.values:
            if key not in self.seen:
                shown = repr(f"{self.prefix}{key}")
                raise ConfigError(f"{self.file}: {shown} is not understood; remove it if it has no effect")

    def unseen(self) -> dict[str, object]:
        return {key: value for key, value in self.values.items() if key not in self.seen}


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_float(value: object) -> float | None:
    """A number that stays finite and apart from zero in float32; an eps of 1e-300 would be 0 there, and 0 / 0 NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if number == 0 or _LEAST_NORMAL <= abs(number) <= _LARGEST else None


def integer(text: str) -> int:
    """The integer that is written in decimal digits, perhaps behind a minus.

    Raises:
        ValueError: it is something else, or has thousands of digits.
    """
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is no integer in decimal digits")
    return int(text)


def number(text: str) -> float:
    """The finite number that is written in decimal digits, perhaps with a point and an exponent.

    Raises:
        ValueError: it is something else, or too large.
    """
    if not _NUMBER.fullmatch(text) or not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]!r} is no finite number in decimal digits")
    return value
