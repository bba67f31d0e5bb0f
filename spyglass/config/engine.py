"""How a model is to be run: device, arithmetic, limits. The only file of Spyglass that reads the environment.

Every field has an environment variable, `SPYGLASS_` and the field's name in capitals; what a caller states wins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_type_hints

from spyglass.config.fields import integer
from spyglass.errors import ConfigError

PREFIX = "SPYGLASS_"
SERVER_PREFIX = "SPYGLASS_SERVER_"
DEVICES = re.compile(r"auto|cpu|cuda(:[0-9]+)?")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "dtype": ("auto", "float32", "bfloat16"),
    "numerics": ("auto", "plain", "reference"),
    "ops": ("auto", "reference"),
    "vision_graphs": ("auto", "on", "off"),
    "engram": ("mmap", "host", "device"),
    "load": ("files", "dummy"),
}
# Page tables have room for every row of a step in every sequence, and a thread takes a stack, before anything runs.
MOST: Mapping[str, int] = {"max_step_tokens": 1 << 20, "max_sequences": 4096, "threads": 1024}
_Options = TypeVar("_Options")
_MAY_BE_NONE = ("max_length", "cache_bytes", "prefix_cache_bytes", "threads")
_MAY_BE_ZERO = ("images", "prefix_cache_bytes", "image_cache_bytes")


def about(text: str) -> dict[str, str]:
    """The metadata of an option's field."""
    return {"help": text}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Checked when made. The `help` metadata of each field is also the text of the command line's options.

    Raises:
        ConfigError: a field has a value that means nothing; the message names it.
    """

    device: str = field(default="auto", metadata=about("auto (a GPU if there is one), cpu, cuda or cuda:N"))
    dtype: Literal["auto", "float32", "bfloat16"] = field(
        default="auto", metadata=about("activations: auto (bfloat16, as released), float32 or bfloat16")
    )
    numerics: Literal["auto", "plain", "reference"] = field(
        default="auto",
        metadata=about(
            "plain: no rounding beyond the dtype; reference: round activations, cache rows and index vectors as the "
            "official code does; auto: reference for packed checkpoints, plain for bf16 ones"
        ),
    )
    ops: Literal["auto", "reference"] = field(
        default="auto", metadata=about("auto (the fastest built implementation of each op) or reference")
    )
    vision_graphs: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata=about("pictures through CUDA graphs: on, off or auto (where they can be had: bfloat16 on a GPU)"),
    )
    expand_weights: bool = field(
        default=False, metadata=about("widen packed FP8 and FP4 weights to the activation dtype when loading")
    )
    images: int = field(default=600, metadata=about("most pictures in one prompt; 0 leaves the picture tower unloaded"))
    max_step_tokens: int = field(default=2048, metadata=about("most tokens of all sequences in one step"))
    max_sequences: int = field(default=64, metadata=about("most sequences running at a time"))
    max_length: int | None = field(
        default=None, metadata=about("longest sequence, prompt and answer together (default: the model's limit)")
    )
    cache_bytes: int | None = field(
        default=None,
        metadata=about("memory for the rows of running sequences (default: what is free, less the most a step needs)"),
    )
    prefix_cache_bytes: int | None = field(
        default=None,
        metadata=about(
            "memory for beginnings of prompts that may come again (default: an eighth of what is free); 0 keeps none"
        ),
    )
    image_cache_bytes: int = field(
        default=256 << 20, metadata=about("memory for encoded pictures that may come again; 0 keeps none")
    )
    grammar_seconds: int = field(
        default=10,
        metadata=about(
            "CPU seconds that a pattern, schema or grammar of an answer may take to compile; its memory is bounded too"
        ),
    )
    engram: Literal["mmap", "host", "device"] = field(
        default="mmap",
        metadata=about(
            "where engram tables are: mmap (left in their files), host (memory) or device (with the weights)"
        ),
    )
    load: Literal["files", "dummy"] = field(
        default="files",
        metadata=about(
            "dummy: draw random weights at full size instead of reading them, to measure speed and memory; config.json "
            "(or a preset's name in place of a folder) is enough"
        ),
    )
    threads: int | None = field(default=None, metadata=about("CPU threads (default: what torch chooses)"))

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not DEVICES.fullmatch(self.device):
            raise ConfigError(f"device is {self.device!r}, expected auto, cpu, cuda or cuda:N")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected {' or '.join(allowed)}")
        for name in ("max_step_tokens", "max_sequences", "max_length", "cache_bytes", "threads", *_MAY_BE_ZERO):
            if name not in _MAY_BE_NONE or getattr(self, name) is not None:
                require_count(name, getattr(self, name), least=0 if name in _MAY_BE_ZERO else 1, most=MOST.get(name))
        if not isinstance(self.expand_weights, bool):
            raise ConfigError(f"expand_weights is {self.expand_weights!r}, expected True or False")


def read_engine_config(
    stated: Mapping[str, Any] | None = None, environment: Mapping[str, str] = os.environ
) -> EngineConfig:
    """`stated` fields, then `SPYGLASS_*` variables, then defaults. A stated None means "not stated".

    Raises:
        ConfigError: an unknown field or variable, or a value that means nothing.
    """
    return read_options(EngineConfig, PREFIX, stated, environment)


def read_options(
    kind: type[_Options],
    prefix: str,
    stated: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> _Options:
    """A dataclass of options from `stated`, then variables that begin with `prefix`, then its defaults.

    Variables of the server are none of the engine's, though their names begin alike.

    Raises:
        ConfigError: an unknown field or variable, or a value that means nothing.
    """
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    for variable, text in environment.items():
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


def require_count(name: str, value: object, *, least: int, most: int | None = None) -> None:
    """Raises ConfigError unless `value` is an integer from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most:,}"
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
    if kind == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(","))
    return text


def _known(names: Iterable[str], prefix: str, spell: Callable[[str], str]) -> str:
    return "known are " + ", ".join(prefix + spell(name) for name in names)
