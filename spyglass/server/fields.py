"""Which fields an object of a request may have. A field is honoured, safe to ignore, or refused by name; never lost."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spyglass.errors import PromptError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """`read` are honoured. `ignored` change nothing here and are only named in the log. `fixed` are known, but only
    these values of them mean something here."""

    read: frozenset[str]
    ignored: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)


def read_fields(body: object, fields: Fields, where: str = "") -> tuple[dict[str, Any], tuple[str, ...]]:
    """The stated fields that are honoured, and the names of those ignored. Null means not stated.

    `where` is the place of the object in the request, empty for the request itself.

    Raises:
        PromptError: not an object, an unknown field, or a value that is not to be had here.
    """
    if not isinstance(body, Mapping):
        raise PromptError(f"{where or 'the request'} must be an object, not {type(body).__name__}")
    stated, ignored = {}, []
    for name, value in body.items():
        path = f"{where}.{name}" if where else str(name)
        if value is None:
            continue
        if name in fields.read:
            stated[name] = value
        elif name in fields.ignored:
            ignored.append(path)
        elif name in fields.fixed:
            _check_fixed(path, value, fields.fixed[name])
        else:
            raise PromptError(_unknown(str(name), path, fields))
    return stated, tuple(ignored)


def text_field(body: Mapping[str, Any], name: str, where: str) -> str:
    """A field that must be there and be text.

    Raises:
        PromptError: it is not.
    """
    value = body.get(name)
    if not isinstance(value, str):
        raise PromptError(f"{where}.{name} must be a string, not {type(value).__name__}")
    return value


def flag_field(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """A field that is true or false.

    Raises:
        PromptError: it is something else.
    """
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise PromptError(f"{name} is {str(value)[:100]!r}, expected true or false")
    return value


def listed(value: object, where: str) -> list[Any]:
    """A value that must be a list.

    Raises:
        PromptError: it is none.
    """
    if not isinstance(value, list | tuple):
        raise PromptError(f"{where} must be a list, not {type(value).__name__}")
    return list(value)


def _check_fixed(path: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(value == one and type(value) is type(one) for one in allowed):
        values = " or ".join(map(repr, allowed))
        raise PromptError(
            f"{path} is not available on this server{f' but as {values}' if allowed else ''}; leave it out"
        )


def _unknown(name: str, path: str, fields: Fields) -> str:
    known = sorted({*fields.read, *fields.ignored, *fields.fixed})
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
    return f"{path[:200]} is not a known field; {hint}"
