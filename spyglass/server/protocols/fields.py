"""Which fields an object of a request may have: one table per object, one reader per request.

A field is honoured, ignored and named (it cannot change the answer here, stands at its neutral value, or is unknown),
or refused by name and place (it would change the answer and is not to be had). With `strict` everything that is not
honoured or known to be harmless is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from spyglass.errors import PromptError, json_kind

_SHOWN_NAMES, _SHOWN_CHARS = 20, 100
NEVER = ()  # no value of the field is neutral


class RequestError(PromptError):
    """A request that is refused. `field` is the place at fault, `code` what programs look for."""

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.code = field, code


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """`read` are honoured. `ignored` cannot change the answer here. `neutral` are known, and any other value of them
    than these would change the answer: it is refused. `inner` are the tables of fields that hold an object, or a list
    whose items are each one of several kinds of objects."""

    read: frozenset[str]
    ignored: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    inner: Mapping[str, Fields | tuple[Fields, ...]] = field(default_factory=dict)


class FieldReader:
    """Reads the objects of one request and collects the places that were ignored; `strict` ignores nothing unknown."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._ignored: dict[str, None] = {}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Places without effect, each once, numbers in lists left out: `messages[].name`."""
        return tuple(self._ignored)

    def ignore(self, place: str) -> None:
        """Note one more place, as far as there is room."""
        if len(self._ignored) < _SHOWN_NAMES:
            self._ignored[re.sub(r"\[\d+\]", "[]", place[: 2 * _SHOWN_CHARS])] = None

    def read(self, value: object, fields: Fields, where: str = "") -> dict[str, Any]:
        """The fields that are given and honoured. Null means not given; `where` is the place of the object.

        Raises:
            RequestError: not an object, or fields that are not to be had; the message names all of them.
        """
        if not isinstance(value, Mapping):
            refuse(where or "the request", f"must be an object, not {json_kind(value)}", where or None)
        given, faults = {}, list[tuple[str, str]]()
        for name, item in value.items():
            if name in fields.read:
                if item is not None:
                    given[name] = item
                continue
            place = f"{where}.{name[:_SHOWN_CHARS]}" if where else name[:_SHOWN_CHARS]
            allowed = fields.neutral.get(name)
            if item is not None and allowed is not None and not _is_among(item, allowed):
                values = f" but as {' or '.join(map(repr, allowed))}" if allowed else ""
                faults.append((place, f"is not available on this server{values}; leave it out"))
            elif item is not None and self.strict and allowed is None and name not in fields.ignored:
                faults.append((place, f"is not a known field; {_hint(name, fields)}"))
            elif item is not None:
                self.ignore(place)
            if len(faults) >= _SHOWN_NAMES:
                break
        if faults:
            raise RequestError("; ".join(f"{place} {why}" for place, why in faults), field=faults[0][0])
        return given


def refuse(place: str, why: str, field: str | None = "", *, code: str | None = None) -> NoReturn:
    """Raises RequestError: `place` of the request, and why it is refused."""
    raise RequestError(f"{place} {why}", field=place if field == "" else field, code=code)


def text_field(given: Mapping[str, Any], name: str, where: str) -> str:
    """A field that must be there and be text.

    Raises:
        RequestError: it is not.
    """
    value = given.get(name)
    place = f"{where}.{name}" if where else name
    return value if isinstance(value, str) else refuse(place, f"must be a string, not {json_kind(value)}")


def flag_field(given: Mapping[str, Any], name: str, where: str = "", *, default: bool = False) -> bool:
    """A field that is true or false.

    Raises:
        RequestError: it is something else.
    """
    value = given.get(name, default)
    place = f"{where}.{name}" if where else name
    return value if isinstance(value, bool) else refuse(place, f"is {str(value)[:100]!r}, expected true or false")


def choice_field(given: Mapping[str, Any], name: str, allowed: Collection[str], where: str = "") -> str | None:
    """A field that is one of a few words, None where it is not given.

    Raises:
        RequestError: it is something else.
    """
    value = given.get(name)
    if value is None or (isinstance(value, str) and value in allowed):
        return value
    place = f"{where}.{name}" if where else name
    refuse(place, f"is {str(value)[:100]!r}, expected one of {', '.join(allowed)}")


def list_of(value: object, where: str, *, least: int = 0) -> list[Any]:
    """A value that must be a list, of at least so many items.

    Raises:
        RequestError: it is none.
    """
    if not isinstance(value, list | tuple):
        refuse(where, f"must be a list, not {json_kind(value)}")
    return list(value) if len(value) >= least else refuse(where, "is empty")


def _is_among(value: object, allowed: tuple[object, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


def _hint(name: str, fields: Fields) -> str:
    known = sorted({*fields.read, *fields.ignored, *fields.neutral})
    close = difflib.get_close_matches(name[:_SHOWN_CHARS], known, 1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
