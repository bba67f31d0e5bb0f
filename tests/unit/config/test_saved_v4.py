"""A V4 configuration that transformers saved is the same model in other words."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spyglass.config import parse_model_config
from spyglass.errors import ConfigError


@pytest.fixture
def saved(golden: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((golden / "configs" / "v4-text-packed-saved.json").read_text(encoding="utf-8"))
    return values


def test_saved_and_official_files_mean_the_same_model(saved: dict[str, Any], golden: Path) -> None:
    official = json.loads((golden / "configs" / "v4-text-packed.json").read_text(encoding="utf-8"))
    ours, theirs = parse_model_config(official, "a"), parse_model_config(saved, "b")
    assert replace(ours, informational={}) == replace(theirs, informational={})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("layer_types", ["sliding_attention"]),
        ("layer_types", "sliding_attention"),
        ("layer_types", ["sliding_attention"] * 4 + ["full_attention"]),
        ("layer_types", [["sliding_attention"]] * 5),
        ("compress_rates", None),
        ("compress_rates.compressed_sparse_attention", "4"),
        ("compress_rates.compressed_sparse_attention", 8),
        ("mlp_layer_types", None),
        ("mlp_layer_types", ["moe", "hash_moe", "moe", "moe", "moe"]),
        ("mlp_layer_types", ["dense"] * 5),
        ("mlp_bias", True),
        ("rope_parameters", None),
        ("rope_parameters.main", None),
        ("rope_parameters.main.rope_type", "yarn"),
        ("rope_parameters.main.rope_theta", "10000"),
        ("rope_parameters.compress.rope_theta", None),
        ("rope_parameters.compress.factor", None),
        ("rope_parameters.compress.attention_factor", 1.3),
    ],
)
def test_a_malformed_saved_field_is_refused_by_name(path: str, value: object, saved: dict[str, Any]) -> None:
    values = copy.deepcopy(saved)
    *sections, key = path.split(".")
    section = values
    for name in sections:
        section = section[name]
    section[key] = value
    with pytest.raises(ConfigError) as caught:
        parse_model_config(values, "config.json")
    # A rate that is no V4 ratio is refused as the schedule it would make.
    assert key in str(caught.value) or "compress_ratios" in str(caught.value)
