"""`spyglass finetune MODEL --data chats.jsonl --output DIR`: train an adapter on chats with images."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from spyglass.cli.options import add_model, required_model
from spyglass.config.fields import integer, number
from spyglass.config.options import choices_of
from spyglass.config.read import read_model_config
from spyglass.config.shipped import find_model
from spyglass.config.training import TrainConfig

HELP = "Train an adapter (a PEFT folder) or, with --full, every weight (a checkpoint) on chats with images."
_NAMED = ("model", "data", "output", "targets")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: one per `TrainConfig` field."""
    parser.usage = "spyglass finetune MODEL --data FILE --output DIR [options]"
    parser.epilog = "The manual, with examples, is docs/training.md."
    add_model(parser, default=False)
    parser.add_argument(
        "--data",
        metavar="FILE",
        type=Path,
        required=True,
        help='chats, one a line: {"messages": [...]}; see docs/training.md',
    )
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder for adapter, state and logs")
    types = get_type_hints(TrainConfig)
    for item in fields(TrainConfig):
        if item.name == "targets":
            parser.add_argument("--targets", metavar="LIST", type=_groups, default=item.default, help=_help(item))
        elif item.name not in _NAMED:
            _add_option(parser, item, types[item.name])


def run(args: argparse.Namespace) -> int:
    """Train; the result is the exit code, 130 for a run that was interrupted and can be resumed."""
    stated = {item.name: getattr(args, item.name) for item in fields(TrainConfig)}
    config = TrainConfig(**{**stated, "model": Path(required_model(args, "finetune"))})
    read_model_config(find_model(config.model))  # a name that means nothing is refused before torch is loaded
    from spyglass.cli.main import INTERRUPTED
    from spyglass.parallel.fsdp import end_worker, init_workers, leave_workers
    from spyglass.train.finetune import chosen_device, finetune

    processes = init_workers(chosen_device(config))
    first = processes.rank == 0  # the others work in silence
    tell = partial(print, flush=True) if first else _say_nothing
    try:
        result = finetune(config, tell=tell, progress=first, processes=processes)
    finally:
        leave_workers()
    if result.finished and not config.full:
        tell(
            f"use it: spyglass chat {config.model} --lora {config.output}; measure it on chats that it did not learn: "
            f"spyglass eval {config.model} --data FILE --lora {config.output}"
        )
    code = 0 if result.finished else INTERRUPTED
    if processes.count > 1:
        end_worker(code)
    return code


def _say_nothing(line: str) -> None:
    """What processes other than the first tell."""


def _add_option(parser: argparse.ArgumentParser, item: Field[Any], kind: Any) -> None:
    option = "--" + item.name.replace("_", "-")
    if kind is bool:
        parser.add_argument(option, action=argparse.BooleanOptionalAction, default=item.default, help=_help(item))
    elif item.name in choices_of(TrainConfig):
        parser.add_argument(option, choices=choices_of(TrainConfig)[item.name], default=item.default, help=_help(item))
    else:
        kinds: dict[Any, tuple[Callable[[str], Any], str]] = {
            str: (str, "NAME"), str | None: (str, "NAME"), int: (integer, "N"), int | None: (integer, "N"),
            Path | None: (Path, "FILE"),
        }  # fmt: skip
        parse, letter = kinds.get(kind, (number, "X"))
        parser.add_argument(option, metavar=letter, type=parse, default=item.default, help=_help(item))


def _help(item: Field[Any]) -> str:
    shown = ",".join(item.default) if isinstance(item.default, tuple) else item.default
    silent = item.default is None or item.default is MISSING or isinstance(item.default, bool)
    text: str = item.metadata["help"]
    return text if silent else f"{text} (default: {shown})"


def _groups(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
