"""`--config FILE.yaml`: options of a verb in a file. What the command line states wins."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spyglass.errors import ConfigError

_OPTION = "--config"


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """The option that names the file."""
    parser.add_argument(
        _OPTION,
        metavar="FILE",
        type=Path,
        help="YAML file of options by their long names (max-length: 4096); the command line wins",
    )


def read_config_file(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Make what a file says the parser's defaults, if the arguments name one.

    Raises:
        ConfigError: it cannot be read, or holds an option that the verb has not, or a value that the option has not.
    """
    if (path := _named(arguments)) is None:
        return
    stated = {text.partition("=")[0] for text in arguments if text.startswith("-")}
    for name, value in _entries(path).items():
        action = parser._option_string_actions.get("--" + str(name).replace("_", "-"))
        if action is None or action.dest in ("config", "help"):
            known = ", ".join(o[2:] for o in parser._option_string_actions if o.startswith("--") and o != "--help")
            raise ConfigError(f"{path}: {name!r} is no option of {parser.prog}; known are {known}")
        if not stated & set(action.option_strings):
            action.required = False
            # a model that is named without an option wins too
            dest = "model" if action.dest == "model_option" else action.dest
            parser.set_defaults(**{dest: _value(parser, action, f"{path}: {name}", value)})


def _named(arguments: Sequence[str]) -> str | None:
    for place, text in enumerate(arguments):
        if text.startswith(_OPTION + "="):
            return text.partition("=")[2]
        if text == _OPTION:
            return arguments[place + 1] if place + 1 < len(arguments) else None
    return None


def _entries(path: str) -> dict[Any, Any]:
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path} must hold options by name, as `max-length: 4096`")
    return found


def _value(parser: argparse.ArgumentParser, action: argparse.Action, place: str, value: Any) -> Any:
    """The value as the option's own reader takes it."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ConfigError(f"{place} is {value!r}, expected true or false")
        return value
    many = isinstance(action, argparse._AppendAction)
    texts = [str(item) for item in value] if many and isinstance(value, list) else [str(value)]
    if isinstance(value, dict | bool) or (isinstance(value, list) and not many):
        raise ConfigError(f"{place} is {value!r}, expected one value")
    try:
        read = [parser._get_value(action, text) for text in texts]
        for item in read:
            parser._check_value(action, item)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{place}: {error.message}") from None
    return read if many else read[0]
