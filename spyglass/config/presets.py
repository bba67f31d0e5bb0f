"""Configurations by name: the released ones as they are published, and smaller ones that differ from them.

`presets.json` has each as a whole config.json, or as the changes (RFC 7396: null removes a field) to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from spyglass.config.json_file import read_json_object
from spyglass.config.model import ModelConfig, VisionConfig
from spyglass.config.read import parse_model_config
from spyglass.families import FAMILIES, Family

Preset = str
PRESETS: tuple[Preset, ...] = tuple(name for family in FAMILIES.values() for name in family.presets)
_PLAIN = {"quantization_config": None, "expert_dtype": None}


def preset_config(preset: Preset, *, packed: bool) -> dict[str, Any]:
    """The config.json of a preset; without `packed` it describes bfloat16 weights.

    `tiny` and `tiny-v41` have every mechanism at the smallest widths; `mini` is the size other engines were timed at,
    with a small tower, `mini-v41` the same with engram tables of 256 MB; `flash-4layer` and `flash-8layer` have the
    official widths and all 256 experts in few layers (17 and 31 GB packed); `flash-vision` and `v41-flash` are the
    official shapes and alone have draft stages.
    """
    entry = read_json_object(Path(__file__).with_name("presets.json"))[preset]
    assert isinstance(entry, dict)
    config: dict[str, Any] = (
        entry["config"] if "config" in entry else _changed(preset_config(entry["like"], packed=True), entry["changes"])
    )
    return config if packed else _changed(config, _PLAIN)


def _changed(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The merge patch of RFC 7396."""
    result = dict(config)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _changed(result.get(key, {}), value) if isinstance(value, dict) else value
    return result


@cache
def config_of(preset: Preset) -> ModelConfig:
    """A preset, packed, as a `ModelConfig`."""
    return parse_model_config(preset_config(preset, packed=True), f"preset {preset}")


def released_vision(family: Family) -> VisionConfig:
    """Image settings of the family's released vision model, to plan with where there is no checkpoint folder."""
    vision = config_of(family.presets[-1]).vision
    assert vision is not None, family
    return vision
