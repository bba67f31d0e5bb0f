"""Command-line options made from `EngineConfig`, so that a field, its option and its help text are one thing."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import get_type_hints

from spyglass.config.engine import CHOICES, EngineConfig, read_engine_config


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """One option per `EngineConfig` field; left out means the environment's value, then the default."""
    group = parser.add_argument_group("how to run")
    types = get_type_hints(EngineConfig)
    for item in fields(EngineConfig):
        option = "--" + item.name.replace("_", "-")
        text = item.metadata["help"]
        if type(item.default) is int:
            text += f" (default: {item.default})"
        if types[item.name] is bool:
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif item.name in CHOICES:
            group.add_argument(option, choices=CHOICES[item.name], help=text)
        else:
            is_text = types[item.name] is str
            group.add_argument(option, type=str if is_text else int, metavar=None if is_text else "N", help=text)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The `EngineConfig` that parsed options ask for.

    Raises:
        ConfigError: an option or `SPYGLASS_*` variable has a value that means nothing.
    """
    return read_engine_config({item.name: getattr(args, item.name) for item in fields(EngineConfig)})
