"""A field that says something else than is computed is refused by name; one that says the same, or nothing, is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from spyglass.config import parse_model_config
from spyglass.errors import ConfigError
from tests.unit.config import v41_released
from tests.unit.config.family_configs import flash_vision

FAMILIES: list[Callable[[], dict[str, Any]]] = [flash_vision, v41_released.official]
# field: (what is computed, what is not), the same for both families
BOTH: dict[str, tuple[Any, Any]] = {
    "mlp_bias": (False, True),
    "attention_bias": (False, True),
    "tie_word_embeddings": (False, True),
    "rope_interleave": (True, False),
    "use_attn_sink": (True, False),
    "n_group": (1, 8),
    "topk_group": (1, 4),
    "moe_layer_freq": (1, 2),
    "first_k_dense_replace": (0, 1),
    "final_logit_softcapping": (None, 30.0),
    "embedding_multiplier": (1.0, 12),
    "hidden_act": ("silu", "gelu"),
    "v_head_dim": (512, 128),
    "qk_nope_head_dim": (448, 128),
    "partial_rotary_factor": (0.125, 0.5),
    "gate_temp": (1, 2),
    "index_topk_freq": (1, 4),
}
OWN: list[dict[str, tuple[Any, Any]]] = [
    {
        "q_head_norm": (True, False),
        "shifted_hyper": (False, True),
        "num_experts": (256, 128),
        "engram_layer_ids": ([], [1]),
        "vision_config": (None, {"num_hidden_layers": 2}),
        "layer_types": (["sliding_attention"] * 2 + ["compressed"] * 41, ["sliding_attention"] * 43),
    },
    {
        "q_head_norm": (False, True),
        "shifted_hyper": (True, False),
        "num_experts": (384, 128),
        "num_hash_layers": (0, 3),
    },
]


@pytest.mark.parametrize("number", [0, 1], ids=["v4", "v41"])
def test_d7_a_field_that_contradicts_what_is_computed_is_refused_by_name(number: int) -> None:
    for field, (computed, other) in {**BOTH, **OWN[number]}.items():
        for value, sound in ((computed, True), (None, True), (other, False)):
            values = FAMILIES[number]()
            section = values.get("text_config", values)
            section[field] = value
            if sound:
                parse_model_config(values, "config.json")
            else:
                with pytest.raises(ConfigError, match=f"{field} is .*expected"):
                    parse_model_config(values, "config.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 4096),
        ("q_head_norm", True),
        ("vision_n_layers", 12),
        ("vision_dim", 512),
        ("compress_ratios", [0]),
    ],
)
def test_d7_what_stands_outside_its_section_must_be_the_same_there(field: str, value: Any) -> None:
    values = v41_released.official()
    parse_model_config({**values, "hidden_size": 5120, "vision_dim": 1024, "vision_n_layers": 32}, "config.json")
    with pytest.raises(ConfigError, match=f"{field} is"):
        parse_model_config({**values, field: value}, "config.json")


@pytest.mark.parametrize(
    ("field", "value"), [("num_channels", 1), ("hidden_act", "gelu"), ("head_dim", 32), ("out_hidden_size", 4096)]
)
def test_d7_a_tower_of_another_kind_is_refused(field: str, value: Any) -> None:
    values = copy.deepcopy(v41_released.official())
    values["vision_config"][field] = value
    with pytest.raises(ConfigError, match=f"vision_config.{field} is"):
        parse_model_config(values, "config.json")
