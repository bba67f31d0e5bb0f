"""Options as dataclass fields: a default, a help text, bounds. The only file of Spyglass that reads the environment.

A field's type says what it may be: one of the words of a `Literal`, an integer within the bounds of its metadata, a
number, texts. The same field is an option of the command line (`cli.options`) and an environment variable: a prefix and
the field's name in capitals. What a caller states wins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from spyglass.config.fields import integer, number
from spyglass.errors import ConfigError

PREFIX = "SPYGLASS_"
SERVER_PREFIX = "SPYGLASS_SERVER_"
# fields that are texts of a form
FORMS = {
    "device": (re.compile(r"auto|cpu|cuda(:[0-9]+)?"), "auto, cpu, cuda or cuda:N"),
    "experts": (re.compile(r"gpu|host|auto(:[0-9]+(\.[0-9]+)?)?"), "gpu, host, auto or auto:GB"),
}
_Options = TypeVar("_Options")


def about(text: str, *, low: int = 1, high: int | None = None) -> dict[str, Any]:
    """The metadata of an option's field: its help text, and the bounds of an integer."""
    return {"help": text, "low": low, "high": high}


def choices_of(kind: type) -> dict[str, tuple[str, ...]]:
    """The words that each `Literal` field of a dataclass of options may be."""
    return {name: get_args(hint) for name, hint in get_type_hints(kind).items() if get_origin(hint) is Literal}


def check_options(options: Any) -> None:
    """Whether every field of a dataclass of options, made with `about`, has a value that its type and bounds allow.

    Raises:
        ConfigError: one has not; the message names it and says what was expected.
    """
    hints, choices = get_type_hints(type(options)), choices_of(type(options))
    for item in fields(options):
        name, value, hint = item.name, getattr(options, item.name), hints[item.name]
        if name in FORMS and not (isinstance(value, str) and FORMS[name][0].fullmatch(value)):
            raise ConfigError(f"{name} is {value!r}, expected {FORMS[name][1]}")
        if name in choices and value not in choices[name]:
            raise ConfigError(f"{name} is {value!r}, expected {' or '.join(choices[name])}")
        if hint is bool and not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}, expected True or False")
        high = item.metadata.get("high")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if hint == float | None and None not in (value, high) and not (is_number and 0 < value <= high):
            raise ConfigError(f"{name} is {value!r}, expected a number above 0, at most {high}")
        if hint is int or (hint == int | None and value is not None):
            require_count(name, value, low=item.metadata["low"], high=high)
        if hint == tuple[str, ...] and not (
            isinstance(value, tuple) and all(isinstance(text, str) and text.strip() for text in value)
        ):
            raise ConfigError(f"{name} is {value!r}, expected non-empty texts")


def read_options(
    kind: type[_Options],
    prefix: str,
    stated: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> _Options:
    """A dataclass of options from `stated`, then variables that begin with `prefix`, then its defaults.

    Variables of the server are none of the engine's, though their names begin alike.

    Raises:
        ConfigError: an unknown field or variable, or a value that means nothing.
    """
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    for variable, text in (os.environ if environment is None else environment).items():
        if variable.startswith(prefix) and (prefix == SERVER_PREFIX or not variable.startswith(SERVER_PREFIX)):
            name = variable.removeprefix(prefix).lower()
            if name not in types:
                raise ConfigError(f"environment variable {variable} is not known; {_known(types, prefix, str.upper)}")
            values[name] = _parse(variable, text, types[name])
    for name, value in (stated or {}).items():
        if name not in types:
            raise ConfigError(f"engine option {name!r} is not known; {_known(types, '', str.lower)}")
        if value is not None:
            values[name] = value
    return kind(**values)


def require_count(name: str, value: object, *, low: int, high: int | None = None) -> None:
    """Raises ConfigError unless `value` is an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        span = f"of at least {low}" if high is None else f"from {low} to {high:,}"
        raise ConfigError(f"{name} is {value!r}, expected an integer {span}")


def _parse(variable: str, text: str, kind: object) -> object:
    """The value of a variable's text; text fields pass as they are and are checked with the rest."""
    if kind is bool:
        if text.lower() not in ("0", "1", "false", "true"):
            raise ConfigError(f"environment variable {variable} is {text!r}, expected true or false")
        return text.lower() in ("1", "true")
    if kind in (int, int | None):
        try:
            return integer(text)
        except ValueError:
            raise ConfigError(f"environment variable {variable} is {text!r}, expected an integer") from None
    if kind == float | None:
        try:
            return number(text)
        except ValueError:
            raise ConfigError(f"environment variable {variable} is {text!r}, expected a number") from None
    if kind == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(","))
    return text


def _known(names: Iterable[str], prefix: str, spell: Callable[[str], str]) -> str:
    return "known are " + ", ".join(prefix + spell(name) for name in names)


def threads_are_bound(environment: Mapping[str, str] | None = None) -> bool:
    """Whether OpenMP has been told to bind threads to processors."""
    stated = os.environ if environment is None else environment
    names = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
    return any(stated.get(name, "").lower() not in ("", "false") for name in names)
