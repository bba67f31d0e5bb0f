"""What config.json must not say: every refusal is a ConfigError that names file and field."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spyglass.config import ModelConfig, parse_model_config, read_model_config
from spyglass.errors import ConfigError
from tests.unit.config.family_configs import flash_vision, reference_flash_vision

NEEDED = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_groups "
    "o_lora_rank sliding_window compress_ratios index_n_heads index_head_dim index_topk rope_theta "
    "compress_rope_theta rope_scaling n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size "
    "routed_scaling_factor num_hash_layers swiglu_limit hc_mult hc_sinkhorn_iters hc_eps rms_norm_eps bos_token_id "
    "eos_token_id vision_dim vision_n_heads vision_inter_dim vision_patch_size vision_rope_theta "
    "vision_downsample_ratio vision_max_n_token vision_min_pixels vision_max_wh_ratio"
).split()
NEEDED_BY_REFERENCE_CODE = (
    "vocab_size dim moe_inter_dim n_layers n_hash_layers n_heads n_routed_experts n_shared_experts "
    "n_activated_experts route_scale swiglu_limit q_lora_rank head_dim rope_head_dim o_groups o_lora_rank "
    "window_size original_seq_len rope_theta rope_factor beta_fast beta_slow index_n_heads index_head_dim "
    "index_topk hc_mult hc_sinkhorn_iters compress_rope_theta compress_ratios"
).split()


def parse(values: dict[str, Any]) -> ModelConfig:
    return parse_model_config(values, "config.json")


def refused(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(values)
    assert str(caught.value).startswith("config.json: ")
    return str(caught.value)


def without(values: dict[str, Any], path: str) -> dict[str, Any]:
    values = copy.deepcopy(values)
    *sections, key = path.split(".")
    section = values
    for name in sections:
        section = section[name]
    del section[key]
    return values


@pytest.mark.parametrize("field", NEEDED)
def test_a_field_that_a_computation_needs_is_never_assumed(field: str) -> None:
    assert f"{field} is missing" in refused(without(flash_vision(), field))


@pytest.mark.parametrize("field", ["type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"])
def test_no_rope_number_is_assumed(field: str) -> None:
    assert f"rope_scaling.{field} is missing" in refused(without(flash_vision(), f"rope_scaling.{field}"))


@pytest.mark.parametrize("field", NEEDED_BY_REFERENCE_CODE)
def test_missing_fields_are_named_as_the_file_spells_them(field: str) -> None:
    values = without(reference_flash_vision(), field)
    message = refused(values)
    assert (f"{field} is missing" if field not in ("dim", "n_layers") else "model_type is missing") in message


MALFORMED = {
    "hidden_size": [True, "4096", 4096.0, -1, 0, None, [4096], 10**30],
    "num_hidden_layers": [10**9, 47],
    "rms_norm_eps": [0, -1e-6, "1e-20", True, float("nan"), float("inf"), 1e-40, 5e-324],
    "hc_eps": [float("nan")],
    "swiglu_limit": [3.5e38, 10**400, None],
    "rope_scaling.factor": [1e308, 0.5, "16"],
    "rope_theta": [1],
    "compress_rope_theta": [0.5],
    "compress_ratios": [
        None,
        [],
        [0, 0, 4],
        "0,0,4",
        [0.0] * 46,
        [False] * 46,
        [-4] * 46,
        [2] * 46,
        [0] * 42 + [64] + [0] * 3,
    ],
    "num_hash_layers": [44, -1],
    "qk_rope_head_dim": [63, 512, 0],
    "index_head_dim": [96, 32],
    "o_groups": [7],
    "num_experts_per_tok": [257],
    "n_shared_experts": [2],
    "num_key_value_heads": [8, True],
    "hidden_act": ["gelu"],
    "scoring_func": ["sigmoid"],
    "topk_method": ["greedy"],
    "norm_topk_prob": [False, 1],
    "attention_bias": [True],
    "tie_word_embeddings": [True],
    "bos_token_id": [129280],
    "eos_token_id": [-1, [], [1, 129280], ["1"]],
    "pad_token_id": [129280],
    "image_token_id": [129280],
    "num_nextn_predict_layers": [-1],
    "expert_dtype": ["int4"],
    "rope_scaling": ["yarn", [16]],
    "rope_scaling.type": ["linear"],
    "rope_scaling.original_max_position_embeddings": [65536.0],
    "rope_scaling.beta_fast": [0.5],
    "rope_scaling.beta_slow": [0],
    "rope_scaling.mscale": [0.7],
    "rope_scaling.attention_factor": [1.2],
    "quantization_config": ["fp8"],
    "quantization_config.quant_method": ["gptq"],
    "quantization_config.fmt": ["e5m2"],
    "quantization_config.scale_fmt": ["e4m3"],
    "quantization_config.activation_scheme": ["static"],
    "quantization_config.weight_block_size": [[128], [0, 128], 128],
    "vision_n_layers": [-1, "32"],
    "vision_n_heads": [17, 512],
    "vision_max_n_token": [8],
    "vision_max_wh_ratio": ["8", 0],
    "vision_min_pixels": [-1],
    "vision_patch_size": [0],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in MALFORMED.items() for value in values],
)
def test_a_malformed_field_is_refused_by_name(field: str, value: object) -> None:
    values = copy.deepcopy(flash_vision())
    *sections, key = field.split(".")
    section = values
    for name in sections:
        section = section[name]
    section[key] = value
    assert field in refused(values)


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("num_hidden_layers", 1024),
        ("n_routed_experts", (1 << 17) // 43),
        ("vision_n_layers", 1024),
        ("hc_sinkhorn_iters", 1000),
        ("sliding_window", 1 << 20),
    ],
)
def test_counts_that_would_be_built_or_repeated_one_by_one_are_bounded(field: str, most: int) -> None:
    """Before a layer, an expert or a page table of that size exists: the refusal takes no time and no memory."""
    ratios = [0] * (1 << 20 if field == "num_hidden_layers" else 46)
    for value in (most + 1, 2**31 - 1):
        assert f"from {0 if field == 'vision_n_layers' else 1} to {most}" in refused(
            {**flash_vision(), "compress_ratios": ratios, field: value}
        )
    if field != "num_hidden_layers":
        parse({**flash_vision(), field: most})


def test_a_message_says_what_was_found_and_what_was_expected() -> None:
    assert refused({**flash_vision(), "hidden_size": "4096"}) == (
        'config.json: hidden_size is "4096", expected an integer of at least 1'
    )
    assert refused({**flash_vision(), "compress_ratios": [0, 4]}) == (
        "config.json: compress_ratios is [0, 4], expected num_hidden_layers = 43 entries, found 2; none is assumed"
    )


def test_a_message_stays_one_short_line() -> None:
    message = refused({**flash_vision(), "hidden_size": ["x" * 10_000]})
    assert len(message) < 300
    assert "\n" not in message


@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v4_dspark",
        "deepseek_v42",
        "deepseek_v4_text",
        "deepseek_v3",
        "DeepSeek_V4",
        "deepseek_v4 ",
        "",
        4,
        None,
    ],
)
def test_families_are_whole_names(family: object) -> None:
    message = refused({**flash_vision(), "model_type": family})
    assert "model_type" in message
    assert "deepseek_v4" in message.split("expected", 1)[1]


def test_a_file_without_a_family_names_the_field() -> None:
    assert "model_type is missing" in refused({"hidden_size": 4096})


def test_v4_numbers_do_not_make_a_v41_model() -> None:
    """The two families differ in more than a name; one's file under the other's name must not load."""
    refused({**flash_vision(), "model_type": "deepseek_v41"})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "expected a JSON object, got list"),
        (b"3", "expected a JSON object, got int"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' is written twice"),
        (b'{"rope_scaling": {"factor": 1, "factor": 2}}', "'factor' is written twice"),
        (b'{"rms_norm_eps": NaN}', "NaN"),
        (b'{"rms_norm_eps": -Infinity}', "-Infinity"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b'{"a": "' + b"x" * (17 << 20) + b'"}', "too large"),
    ],
)
def test_a_file_that_is_not_plain_json_is_refused(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_model_config(tmp_path)
    assert says in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_missing_folder_or_file_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("nowhere", "file", "file/below", "x" * 5000, "nul\0"):
        with pytest.raises(ConfigError, match="not a folder"):
            read_model_config(tmp_path / name)
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        read_model_config(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match=r"is an adapter and no checkpoint.*--lora"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="no such file"):
        read_model_config(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="no such file"):
        read_model_config(tmp_path)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
NEAR_MISS = st.sampled_from(
    [0, 1, 2, 3, 7, 31, 63, 64, 65, 127, 128, 511, 512, 4096, 2**31, 2**63, 0.5, 1.0, 1e-30, -1, True]
)
PLACES = [(key,) for key in flash_vision()] + [
    (section, key) for section in ("rope_scaling", "quantization_config") for key in flash_vision()[section]
]


@given(place=st.sampled_from(PLACES), value=NEAR_MISS | ANY_JSON)
def test_any_one_change_either_loads_or_is_refused_by_name(place: tuple[str, ...], value: object) -> None:
    values = copy.deepcopy(flash_vision())
    section = values if len(place) == 1 else values[place[0]]
    section[place[-1]] = value
    try:
        config = parse(values)
    except ConfigError as error:
        assert place[-1] in str(error)
    else:
        assert len(config.text.layers) == config.text.num_hidden_layers
        json.dumps(config.informational, allow_nan=True)


@given(values=st.dictionaries(st.sampled_from([*flash_vision(), *reference_flash_vision()]), NEAR_MISS | ANY_JSON))
def test_any_object_either_loads_or_is_refused(values: dict[str, Any]) -> None:
    for family in ({"model_type": "deepseek_v4"}, {}):
        try:
            parse({**flash_vision(), **values, **family})
        except ConfigError as error:
            assert str(error).startswith("config.json: ")


@given(data=st.data())
def test_a_damaged_file_either_loads_or_is_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sound = json.dumps(flash_vision()).encode()
    first, length = data.draw(st.integers(0, len(sound) - 1)), data.draw(st.integers(0, 40))
    damaged = sound[:first] + data.draw(st.binary(max_size=6)) + sound[first + length :]
    folder = tmp_path_factory.getbasetemp()
    (folder / "config.json").write_bytes(damaged)
    try:
        read_model_config(folder)
    except ConfigError as error:
        assert "\n" not in str(error)
