"""Engine configuration: what is stated wins over the environment, and nothing meaningless passes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from spyglass.config import EngineConfig, read_engine_config
from spyglass.errors import ConfigError


def test_stated_wins_over_environment_wins_over_default() -> None:
    environment = {"SPYGLASS_DEVICE": "cuda:1", "SPYGLASS_IMAGES": "3", "SPYGLASS_EXPAND_WEIGHTS": "true", "HOME": "x"}
    config = read_engine_config({"device": "cpu", "images": None, "threads": 2}, environment)
    assert config == EngineConfig(device="cpu", images=3, expand_weights=True, threads=2)
    assert read_engine_config({}, {}) == EngineConfig()


def test_every_field_has_a_variable_and_a_help_text() -> None:
    texts = {"device": "cpu", "dtype": "float32", "numerics": "plain", "ops": "reference", "engram": "host"}
    texts |= {
        "vision_graphs": "off",
        "numbers": "strict",
        "expand_weights": "1",
        "load": "dummy",
        "async_scheduling": "off",
        "experts": "auto:7.5",
        "gpu_memory_utilization": "1.0",
    }
    environment = {f"SPYGLASS_{item.name.upper()}": texts.get(item.name, "7") for item in fields(EngineConfig)}
    config = read_engine_config({}, environment)
    assert all(getattr(config, item.name) in (texts.get(item.name), 7, True, 1.0) for item in fields(EngineConfig))
    assert all(item.metadata["help"] for item in fields(EngineConfig))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("device", 0),
        ("dtype", "float16"),
        ("numerics", "exact"),
        ("ops", "triton"),
        ("vision_graphs", True),
        ("images", -1),
        ("images", True),
        ("images", 1.0),
        ("max_step_tokens", 0),
        ("max_step_tokens", (1 << 20) + 1),
        ("max_step_tokens", None),
        ("max_sequences", "64"),
        ("max_sequences", 4097),
        ("max_length", 0),
        ("cache_bytes", 0),
        ("prefix_cache_bytes", -1),
        ("image_cache_bytes", -1),
        ("image_cache_bytes", None),
        ("threads", 0),
        ("threads", 1025),
        ("expand_weights", 1),
    ],
)
def test_a_meaningless_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field} is "):
        EngineConfig(**{field: value})


def test_a_refused_count_says_its_range() -> None:
    with pytest.raises(ConfigError, match=r"^threads is 0, expected an integer from 1 to 1,024$"):
        EngineConfig(threads=0)


def test_a_context_length_above_the_models_own_is_refused_and_never_cut() -> None:
    assert EngineConfig().context_length(4096) == 4096
    assert [EngineConfig(max_length=length).context_length(4096) for length in (1, 4095, 4096)] == [1, 4095, 4096]
    with pytest.raises(ConfigError, match=r"^max_length \(--max-model-len\) is 4,097, and .* is 4,096 tokens"):
        EngineConfig(max_length=4097).context_length(4096)


def test_caches_may_be_off() -> None:
    EngineConfig(prefix_cache_bytes=0, image_cache_bytes=0, images=0)


def test_what_takes_memory_before_anything_runs_may_be_as_large_as_the_message_says() -> None:
    EngineConfig(max_step_tokens=1 << 20, max_sequences=4096, threads=1024, max_length=10**15, cache_bytes=10**15)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("SPYGLASS_IMAGES", "many"),
        ("SPYGLASS_THREADS", "1.5"),
        ("SPYGLASS_EXPAND_WEIGHTS", "maybe"),
        ("SPYGLASS_IMAGE", "1"),
    ],
)
def test_a_bad_or_unknown_variable_is_refused_by_name(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} is "):
        read_engine_config({}, {variable: text})


def test_a_misspelt_option_is_not_dropped() -> None:
    with pytest.raises(ConfigError, match="'image' is not known; known are device, dtype"):
        read_engine_config({"image": 1}, {})


def test_a_configuration_does_not_change() -> None:
    config = EngineConfig()
    with pytest.raises(FrozenInstanceError):
        config.device = "cpu"  # type: ignore[misc]


@pytest.mark.parametrize("text", ["1_0", " 1", "+1", "\u0661", "one", ""])
def test_a_number_in_the_environment_is_written_in_plain_digits(text: str) -> None:
    with pytest.raises(ConfigError, match=r"SPYGLASS_THREADS is .*, expected an integer"):
        read_engine_config({}, {"SPYGLASS_THREADS": text})
