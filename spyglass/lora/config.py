"""`adapter_config.json` of a PEFT folder: what is honoured, and a refusal by name of everything that is not."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spyglass.config.json_file import read_json_object
from spyglass.errors import AdapterError, ConfigError
from spyglass.lora.fit import check_alpha

CONFIG_NAME = "adapter_config.json"
# fields that change nothing about what the tensors mean
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_config", "megatron_core", "peft_type",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
_HONOURED = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_parameters"}
# ways to begin that leave the base as it is; all others (PiSSA, OLoRA, ...) subtract something from it first
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_PLAIN = re.compile(r"[\w.-]+")
# What else a pattern may be: single characters, repeated or not, and choices that are not repeated. The reader of
# regular expressions tries all ways in which a pattern may fit: nested repetitions take for ever.
_CHARACTER = r"(?:[\w.-]|\\[dw.-]|\[\^?[\w.-]+\])(?:[*+]\??|\?)?"
_TAME = re.compile(rf"\^?(?:{_CHARACTER}|\((?:\?:)?(?:{_CHARACTER}|\|)*\)\??|\|)*\$?")
MAX_PATTERNS = 512  # that are no names: each takes 0.1 ms, beside which the steps of a server get on slowly
_WAYS, _MOST_WAYS = 64, 1 << 20  # places in a name where a repetition can end; what a pattern may try in all
_WHY = {
    "use_dora": "DoRA also scales the rows of the weight",
    "lora_bias": "a bias of B is not implemented",
    "bias": "trained biases are not implemented",
    "modules_to_save": "whole modules cannot be replaced; only low-rank pairs are read",
    "fan_in_fan_out": "transposed weights do not occur in these models",
}


class Patterns:
    """Values by the ends of names: regular expressions, each at the start of a name or behind a dot, the first wins.

    Most are just names, often thousands of them: those are looked up, not tried one by one.
    """

    def __init__(self, values: Mapping[str, float]) -> None:
        self._names: dict[str, tuple[int, float]] = {}
        self._others: list[tuple[int, re.Pattern[str], float]] = []
        for place, (key, value) in enumerate(values.items()):
            plain = key.replace(r"\.", ".")
            if _PLAIN.fullmatch(plain):
                self._names.setdefault(plain, (place, value))
            else:
                self._others.append((place, _compiled(key), value))

    def find(self, name: str, default: float) -> float:
        """The value of the first pattern that fits."""
        parts = name.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts)))
        found = [self._names[end] for end in ends if end in self._names]
        found += [(place, value) for place, pattern, value in self._others if pattern.match(name)]
        return min(found)[1] if found else default


def _compiled(key: str) -> re.Pattern[str]:
    """Raises ValueError for what is no pattern, or one that could take long."""
    if not _TAME.fullmatch(key):
        raise ValueError("names, '.*', '\\d+' and choices (a|b) are read")
    bare = re.sub(r"\\.|\[[^]]*\]|\?:", "", key)
    choices = [group.count("|") + 1 for group in re.findall(r"\(.*?\)", bare)]
    ways = _WAYS ** (bare.count("*") + bare.count("+")) * 2 ** bare.count("?") * math.prod(choices)
    if ways > _MOST_WAYS:
        raise ValueError("it has too many repetitions and choices")
    try:
        return re.compile(rf"(.*\.)?({key})$")
    except re.error as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Ranks and factors of an adapter, and the stacked tensors it has pairs for."""

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Patterns
    alpha_pattern: Patterns
    target_parameters: tuple[str, ...]

    def rank_of(self, name: str) -> int:
        """Rank of a module (or parameter) by its name in the file."""
        return int(self.rank_pattern.find(name, self.rank))

    def alpha_of(self, name: str) -> float:
        """Alpha of a module by its name in the file."""
        return self.alpha_pattern.find(name, self.alpha)


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read and check the config of a PEFT folder.

    Raises:
        AdapterError: it is missing, malformed, no LoRA, or asks for something that is not implemented (named).
    """
    path = directory / CONFIG_NAME
    if not path.is_file():
        lacks = f"it has no {CONFIG_NAME}" if directory.is_dir() else "there is no such folder"
        raise AdapterError(f"{directory} is no adapter: {lacks}; name the folder that PEFT saved")
    try:
        values = read_json_object(path)
    except ConfigError as error:
        raise AdapterError(str(error)) from error
    if values.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: peft_type is {values.get('peft_type')!r}; only LORA adapters are read")
    _refuse_the_rest(path, values)
    return AdapterConfig(
        rank=_rank(path, "r", values.get("r", 8)),
        alpha=_alpha(path, "lora_alpha", values.get("lora_alpha", 8)),
        rslora=_flag(path, values.get("use_rslora", False)),
        rank_pattern=Patterns(
            {k: _rank(path, f"rank_pattern {k}", r) for k, r in _patterns(path, values, "rank_pattern").items()}
        ),
        alpha_pattern=Patterns(
            {k: _alpha(path, f"alpha_pattern {k}", a) for k, a in _patterns(path, values, "alpha_pattern").items()}
        ),
        target_parameters=_names(path, values.get("target_parameters")),
    )


def _refuse_the_rest(path: Path, values: Mapping[str, Any]) -> None:
    start = values.get("init_lora_weights", True)
    if not any(start is plain or (isinstance(start, str) and start == plain) for plain in _PLAIN_STARTS):
        raise AdapterError(
            f"{path}: init_lora_weights is {start!r}, which changes the base weights before training; convert the "
            "adapter to a plain LoRA (PEFT: path_initial_model_for_weight_conversion)"
        )
    for name, value in values.items():
        off = value is None or value is False or value in ("none", 0, [], {}, "")
        if off or name in _HARMLESS | _HONOURED | {"init_lora_weights"}:
            continue
        why = _WHY.get(name, "this is not implemented, and to ignore it could change the answers")
        raise AdapterError(f"{path}: {name} is {str(value)[:80]!r}: {why}")


def _rank(path: Path, name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise AdapterError(f"{path}: {name} is {value!r}; a rank is a whole number of at least 1")
    return value


def _alpha(path: Path, name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise AdapterError(f"{path}: {name} is {value!r}; an alpha is a number")
    try:
        return check_alpha(value)
    except AdapterError as error:
        raise AdapterError(f"{path}: {name} is no alpha: {error}") from error


def _flag(path: Path, value: Any) -> bool:
    if type(value) is not bool:
        raise AdapterError(f"{path}: use_rslora is {value!r}; it must be true or false")
    return value


def _patterns(path: Path, values: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise AdapterError(f"{path}: {name} must map module names to numbers")
    others = [key for key in found if not _PLAIN.fullmatch(key.removeprefix("^").removesuffix("$").replace(r"\.", "."))]
    if len(others) > MAX_PATTERNS:
        raise AdapterError(
            f"{path}: {name} has {len(others):,} patterns that are no names, {MAX_PATTERNS} may be; write names"
        )
    for key in others:
        try:
            _compiled(key)
        except ValueError as error:
            raise AdapterError(f"{path}: {name} has {key[:80]!r}, which is no pattern that is read: {error}") from error
    return found


def _names(path: Path, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise AdapterError(f"{path}: target_parameters must be a list of names")
    return tuple(value)
