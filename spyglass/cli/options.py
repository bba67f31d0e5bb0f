"""Command-line options made from option dataclasses, so that a field, its option and its help text are one thing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from spyglass.config.engine import EngineConfig, read_engine_config
from spyglass.config.fields import integer, number
from spyglass.config.hub import read_hub_id
from spyglass.config.model import ModelConfig
from spyglass.config.options import choices_of
from spyglass.config.read import read_model_config
from spyglass.config.server import ServerConfig, read_server_config
from spyglass.config.shipped import (
    base_note,
    default_model,
    find_adapter,
    find_model,
    model_name,
    shipped_adapters,
    shipped_models,
)
from spyglass.errors import ConfigError
from spyglass.lora.use import adapter_name

# what vLLM or llama.cpp call an option here; the table of docs/cli.md is held to it by a test
ALIASES: Mapping[str, tuple[str, ...]] = {
    "max_length": ("--max-model-len", "--ctx-size", "-c"),
    "max_sequences": ("--max-num-seqs",),
    "max_step_tokens": ("--max-num-batched-tokens",),
    "model_name": ("--served-model-name",),
    "tensor_parallel_size": ("-tp",),
    "threads": ("-t",),
    "max_tokens": ("--max-new-tokens", "-n"),
    "temperature": ("--temp",),
    "prompt": ("-p",),
}
MODEL_FORMS = "checkpoint folder, shipped model or hub id (ORG/NAME[@revision])"
ADAPTER = "lora"  # what the one adapter of a command line is called


def add_model(parser: argparse.ArgumentParser, *, default: bool = True) -> None:
    """The model of a verb: its first argument, or `--model`. With `default` it may be left out."""
    told = MODEL_FORMS + (f" (default: {default_model()})" if default else "")
    parser.add_argument("model", metavar="MODEL", nargs="?", help=told)
    add_model_option(parser)


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """The other way to name the model; `stated_model` reads both."""
    parser.add_argument("-m", "--model", dest="model_option", metavar="MODEL", help=f"the same: {MODEL_FORMS}")


def stated_model(args: argparse.Namespace) -> str | None:
    """The model that a command line names, None if it names none.

    Raises:
        ConfigError: it names two.
    """
    placed, option = args.model, args.model_option
    if placed is not None and option is not None:
        raise ConfigError(f"the model is named twice, {placed!r} and --model {option!r}; leave one out")
    return option if placed is None else placed


def required_model(args: argparse.Namespace, verb: str) -> str:
    """The model that a command line names.

    Raises:
        ConfigError: it names none or two.
    """
    if (stated := stated_model(args)) is None:
        raise ConfigError(f"no model is named; say `spyglass {verb} MODEL`: {MODEL_FORMS}")
    return stated


def model_folder(stated: str | None) -> Path:
    """The folder of a model named by path, by its shipped name or by its hub id, or of the default one.

    Raises:
        ConfigError: none was named, and the default one is not there; the hub's model cannot be had.
    """
    folder = find_model(default_model() if stated is None else stated)
    if stated is None and not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} here; name a model with --model: {MODEL_FORMS}")
    return folder


def require_readable(folder: Path, options: EngineConfig) -> ModelConfig | None:
    """Refuse a folder without a configuration, or options beyond its model, before anything heavy is imported; None
    where weights are to be drawn.

    Raises:
        ConfigError: as `read_model_config`, `EngineConfig.check_model`.
    """
    if options.load != "files":
        return None
    config = read_model_config(folder)
    options.check_model(config)
    return config


def names_model(text: str) -> bool:
    """Whether a text can only be meant as a model: a shipped name, a hub id, or a checkpoint's folder."""
    return text in shipped_models() or read_hub_id(text) is not None or (Path(text) / "config.json").is_file()


def add_lora_option(parser: argparse.ArgumentParser) -> None:
    """The option that names one adapter; its value is what `LLM` takes as `adapters`, by the name `ADAPTER`."""
    parser.add_argument("--lora", metavar="DIR", help=f"use an adapter: a PEFT folder{told_adapters()}")


def told_adapters() -> str:
    """What help says about the adapters that come with the models; nothing if none do."""
    names = {name: shipped_adapters(find_model(name)) for name in shipped_models()}
    told = "; ".join(f"with {model} {', '.join(adapters)}" for model, adapters in names.items() if adapters)
    return f", or the name of one that comes {told}" if told else ""


def adapters_of(args: argparse.Namespace) -> dict[str, str]:
    """Adapters for an `LLM`, from the option of `add_lora_option`."""
    return {} if args.lora is None else {ADAPTER: args.lora}


def note_bases(adapters: Mapping[str, str], model: Path) -> None:
    """Remark on adapters (folders or shipped names, by name) that were made for another model than the one in a folder.

    Raises:
        AdapterError: as `find_adapter`.
    """
    for place in adapters.values():
        if (note := base_note(find_adapter(place, model), model_name(model))) is not None:
            print(f"spyglass: warning: {note}", file=sys.stderr, flush=True)


def adapters_by_name(stated: Sequence[str], models: Collection[str]) -> dict[str, str]:
    """Folders by the names under which requests ask for them, from `--lora NAME=DIR` options.

    Raises:
        ConfigError: not NAME=DIR, or a name twice.
        AdapterError: something that is no name, or is that of one of the `models`.
    """
    found: dict[str, str] = {}
    for text in stated:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise ConfigError(
                f"--lora is {text!r}, expected NAME=DIR: what requests call it, then its folder or shipped name"
            )
        if adapter_name(name, models) in found:
            raise ConfigError(f"--lora names {name!r} twice; give each adapter a name of its own")
        found[name] = folder
    return found


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """One option per `EngineConfig` field; left out means the environment's value, then the default."""
    _add(parser.add_argument_group("how to run"), EngineConfig)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """One option per `ServerConfig` field, likewise."""
    _add(parser.add_argument_group("how to serve"), ServerConfig)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The `EngineConfig` that parsed options ask for.

    Raises:
        ConfigError: an option or `SPYGLASS_*` variable has a value that means nothing.
    """
    return read_engine_config(stated(args, EngineConfig))


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The `ServerConfig` that parsed options ask for.

    Raises:
        ConfigError: an option or `SPYGLASS_SERVER_*` variable has a value that means nothing.
    """
    values = stated(args, ServerConfig)
    return read_server_config({name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


def stated(args: argparse.Namespace, kind: type[EngineConfig] | type[ServerConfig]) -> dict[str, Any]:
    """What the command line says of each field; None = nothing."""
    return {item.name: getattr(args, item.name) for item in fields(kind)}


def _add(group: argparse._ArgumentGroup, kind: type[EngineConfig] | type[ServerConfig]) -> None:
    types, choices = get_type_hints(kind), choices_of(kind)
    for item in fields(kind):
        names = ("--" + item.name.replace("_", "-"), *ALIASES.get(item.name, ()))
        text = item.metadata["help"]
        if type(item.default) is int:
            text += f" (default: {item.default})"
        if types[item.name] is bool:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif item.name in choices:
            group.add_argument(*names, choices=choices[item.name], help=text)
        elif types[item.name] == tuple[str, ...]:
            group.add_argument(*names, action="append", metavar="TEXT", help=text)
        else:
            kinds: dict[Any, Callable[[str], Any]] = {str: str, float | None: number}
            read = kinds.get(types[item.name], integer)
            metavar = item.name.rpartition("_")[2].upper() if read is str else "X" if read is number else "N"
            group.add_argument(*names, type=read, metavar=metavar, help=text)
