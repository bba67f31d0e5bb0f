"""The released models cut down to a few layers, on the device "meta": all sizes are real, and nothing has memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from spyglass.bench.shapes import model_of_shapes
from spyglass.config.model import ModelConfig
from spyglass.config.read import parse_model_config
from spyglass.model import LoadedModel
from tests.unit.config.family_configs import flash_vision
from tests.unit.config.v41_released import official

LAYERS = {"v4": 5, "v41": 26}  # with every kind of layer


def released_config(family: str) -> ModelConfig:
    """The first layers of V4-Flash-Vision or V4.1-Flash."""
    config = parse_model_config(flash_vision() if family == "v4" else official(), family)
    return replace(config, text=replace(config.text, layers=config.text.layers[: LAYERS[family]]))


@cache
def released(family: str) -> LoadedModel:
    """The model as it lies on a GPU, in bf16 with packed weights, with Triton's ops where there are some."""
    return model_of_shapes(released_config(family))
