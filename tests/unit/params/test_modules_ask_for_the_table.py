"""The modules of a model ask for exactly the parameters that its table declares, and for none of a draft stage."""

from __future__ import annotations

import pytest

from spyglass.config.model import ModelConfig
from spyglass.config.presets import PRESETS, preset_config
from spyglass.config.read import parse_model_config
from spyglass.params.table import param_table
from tests.small_models import SMALL, empty_model
from tests.small_v41 import small_v41_config

CONFIGS: dict[str, ModelConfig] = {
    "small": parse_model_config(SMALL, "small"),
    "small-text": parse_model_config({**SMALL, "vision_n_layers": 0}, "small"),
    "small-v41": small_v41_config(),
    **{name: parse_model_config(preset_config(name, packed=True), name) for name in PRESETS},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_modules_ask_for_exactly_the_table(name: str) -> None:
    """Tables of memories are read by the engram, not held by a module."""
    table = {name: param for name, param in param_table(CONFIGS[name]).items() if param.kind != "table"}
    asked = empty_model(CONFIGS[name]).slots()
    assert len(asked) == len(table) and {slot.name for slot in asked} == set(table)
    for slot in asked:
        param = table[slot.name]
        assert (slot.shape, slot.kind, slot.optional) == (param.shape, param.kind, param.optional), slot.name


@pytest.mark.parametrize("name", ["small", "small-v41"])
def test_a_model_without_images_asks_for_less_and_nothing_else(name: str) -> None:
    table = param_table(CONFIGS[name])
    asked = {slot.name for slot in empty_model(CONFIGS[name], pictures=False).slots()}
    left_out = {
        name
        for name, param in table.items()
        if param.component in ("vision", "aligner", "image", "engram") or name.endswith("bias_vl")
    }
    assert asked == set(table) - left_out
