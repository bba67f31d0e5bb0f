"""V4.1 configurations: printed fields, the roles that follow from the lists, what is refused (spec v41 1, 3.1)."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from spyglass.config import (
    CandidatePlan,
    ModelConfig,
    RopeSpec,
    Rounding,
    WeightQuant,
    YarnScaling,
    parse_model_config,
)
from spyglass.errors import ConfigError
from spyglass.quant.formats import FakeQuant
from tests.unit.config import v41_released as released
from tests.unit.engram.v41_release import RELEASE


def read(values: dict[str, Any]) -> ModelConfig:
    return parse_model_config(values, "config.json")


def changed(**fields: Any) -> dict[str, Any]:
    values = released.official()
    values["text_config"].update(fields)
    return values


def test_the_released_numbers_arrive() -> None:
    config = read(released.official())
    text, vision = config.text, config.vision
    assert config.family == "deepseek_v41" and vision is not None
    assert (text.vocab_size, text.hidden_size, text.num_hidden_layers) == (129280, 5120, 40)
    assert (text.num_attention_heads, text.head_dim, text.layers[0].rope.dim) == (64, 512, 64)
    assert (text.q_lora_rank, text.o_groups, text.o_lora_rank) == (1280, 8, 1024)
    assert (text.n_routed_experts, text.n_shared_experts, text.num_experts_per_tok) == (384, 1, 6)
    assert (text.moe_intermediate_size, text.routed_scaling_factor, text.swiglu_limit) == (2304, 1.5, 10.0)
    assert (text.index_n_heads, text.index_head_dim, text.index_topk, text.sliding_window) == (32, 128, 512, 128)
    assert (text.hc_mult, text.hc_sinkhorn_iters, text.hc_eps, text.rms_norm_eps) == (4, 20, 1e-6, 1e-20)
    assert (text.q_head_norm, text.shifted_hyper, text.max_position_embeddings) == (False, True, 1048576)
    assert text.candidates == CandidatePlan(num_blocks=2048, block_size=8)
    assert (vision.num_hidden_layers, vision.hidden_size, vision.num_attention_heads) == (32, 1024, 16)
    assert (vision.intermediate_size, vision.patch_size, vision.downsample_ratio) == (2816, 14, 3)
    assert (vision.max_tokens, vision.min_pixels, vision.max_wh_ratio) == (1024, 544 * 544, None)
    assert (vision.layout, vision.norm_eps, vision.rope_theta) == ("reading", 1e-6, 10000.0)
    assert config.weights == WeightQuant(block=(32, 32), expert_dtype="fp4")
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (0, (1,), 2)
    assert (config.image_token_id, config.num_draft_layers) == (129264, 3)
    assert config.draft["dspark_target_layer_ids"] == [37, 38, 39]


def test_the_engram_fields_arrive() -> None:
    engram = read(released.official()).text.engram
    assert engram == RELEASE
    assert (engram.lookback, engram.columns, engram.row_width) == (3, 24, 6144)


def test_the_layer_roles_are_those_of_the_specification() -> None:
    layers = read(released.official()).text.layers
    assert [layer.ratio for layer in layers] == [0] * 2 + [2] * 18 + [1] * 20
    owners = [layer.index for layer in layers if layer.compressor is not None]
    indexers = [layer.index for layer in layers if layer.index_from == layer.index]
    assert owners == [2, 8, 14, 20] and indexers == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [layer.index for layer in layers if layer.engram] == [1, 14]
    assert [layer.index for layer in layers if layer.makes_candidates] == [20]
    assert {
        layer.index: layer.candidates_from for layer in layers if layer.candidates_from is not None
    } == dict.fromkeys((24, 28, 32, 36), 20)
    assert {layer.index: layer.index_keys_from for layer in layers if layer.index_keys_from is not None} == {
        2: 2, 8: 8, 14: 14, 20: 20, 24: 20, 28: 20, 32: 20, 36: 20,
    }  # fmt: skip
    for layer in layers:
        expected_kv = max((source for source in owners if source <= layer.index), default=None)
        expected_index = max((source for source in indexers if source <= layer.index), default=None)
        assert (layer.kv_from, layer.index_from) == (expected_kv, expected_index)
        assert layer.router == "topk"


def test_compressors_have_no_overlap_and_no_bias_and_ratio_one_has_no_gate() -> None:
    layers = read(released.official()).text.layers
    plans = {layer.index: layer.compressor for layer in layers if layer.compressor is not None}
    assert {index: (plan.ratio, plan.gated) for index, plan in plans.items()} == {
        2: (2, True), 8: (2, True), 14: (2, True), 20: (1, False),
    }  # fmt: skip
    assert all(not plan.overlap and not plan.positional_bias for plan in plans.values())
    assert all(plan.index_keys == "latent" and plan.group_rows == plan.ratio for plan in plans.values())


def test_local_layers_rotate_without_yarn_and_the_others_with_it() -> None:
    layers = read(released.official()).text.layers
    yarn = YarnScaling(factor=16.0, original_max_position=65536, beta_fast=32.0, beta_slow=1.0)
    assert {layer.rope for layer in layers if layer.ratio == 0} == {RopeSpec(theta=10000.0, dim=64, yarn=None)}
    assert {layer.rope for layer in layers if layer.ratio} == {RopeSpec(theta=160000.0, dim=64, yarn=yarn)}


def test_rounding_is_in_blocks_of_32_and_the_pool_in_16_with_e4m3_scales() -> None:
    a8 = FakeQuant(element="e4m3", block=32, scale="e8m0")
    assert read(released.official()).text.reference_rounding == Rounding(
        linear=a8,
        window=a8,
        pool=FakeQuant(element="e2m1", block=16, scale="e4m3"),
        index=FakeQuant(element="e2m1", block=32, scale="e8m0"),
        hadamard=False,
        kv_dims=512,
        rope_dims_bf16=False,
    )


def test_the_flat_reference_file_says_the_same() -> None:
    official, reference = read(released.official()), read(released.reference())
    same = replace(official, pad_token_id=None, draft={}, informational={})
    assert replace(reference, draft={}, informational={}) == same


def test_keys_that_nothing_reads_are_kept_and_no_others() -> None:
    config = read(changed(attention_dropout=0.0))
    assert config.informational == {
        "architectures": ["DeepseekV41ForCausalLM"],
        "dtype": "bfloat16",
        "attention_dropout": 0.0,
    }


def transformers_dialects() -> list[dict[str, Any]]:
    """What transformers may make of `rope_scaling` on the way from one file to another (spec v41 1.1)."""
    moved = {**released.ROPE_SCALING, "rope_type": "yarn", "rope_theta": 10000.0}
    renamed = {key: value for key, value in moved.items() if key != "type"}
    compress = {**renamed, "rope_theta": 160000.0, "attention_factor": 1.0, "partial_rotary_factor": 0.125}
    main = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125}
    return [moved, renamed, {"main": main, "compress": compress}]


@pytest.mark.parametrize("parameters", transformers_dialects())
def test_rope_survives_what_transformers_does_to_it(parameters: dict[str, Any]) -> None:
    values = released.official()
    del values["text_config"]["rope_scaling"]
    values["text_config"]["rope_parameters"] = parameters
    assert read(values).text.layers == read(released.official()).text.layers
    del values["text_config"]["rope_theta"]
    assert read(values).text.layers == read(released.official()).text.layers
    values["text_config"]["rope_scaling"] = copy.deepcopy(parameters)  # both spellings, as a property writes them
    assert read(values).text.layers == read(released.official()).text.layers


def test_two_different_rope_bases_are_refused() -> None:
    moved = {**released.ROPE_SCALING, "rope_theta": 50000.0}
    with pytest.raises(ConfigError, match="rope_theta"):
        read(changed(rope_scaling=moved))


def test_a_checkpoint_without_tower_or_engram_loads() -> None:
    values = changed(engram_layer_ids=[])
    del values["vision_config"]
    config = read(values)
    assert config.vision is None and config.text.engram is None
    assert not any(layer.engram for layer in config.text.layers)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compress_ratios", [0] * 2 + [2] * 18 + [4] * 20),
        ("compress_ratios", [0] * 2 + [2] * 18 + [1] * 19),
        ("kv_source_layer_ids", [8, 14, 20]),
        ("kv_source_layer_ids", [2, 8, 14]),
        ("kv_source_layer_ids", [2, 8, 14, 20, 40]),
        ("kv_source_layer_ids", [1, 2, 8, 14, 20]),
        ("kv_source_layer_ids", [2, 14, 8, 20]),
        ("kv_source_layer_ids", [2, 8, 14, 20, 22]),
        ("index_source_layer_ids", [2, 8, 20, 24]),
        ("candidate_source_layer_id", 21),
        ("candidate_source_layer_id", 14),
        ("candidate_source_layer_id", 40),
        ("candidate_topk_blocks", 0),
        ("candidate_block_size", None),
        ("engram_layer_ids", [14, 1]),
        ("engram_layer_ids", [1, 40]),
        ("engram_num_embeddings", [384006168]),
        ("engram_compressed_vocab_size", 129281),
        ("engram_pad_token_id", 129280),
        ("engram_max_ngram_size", 1),
        ("gate_temp", 0.5),
        ("num_key_value_heads", 8),
        ("rms_norm_eps", None),
        ("rope_scaling", None),
        ("index_topk", "512"),
    ],
)
def test_a_wrong_or_missing_field_is_refused_by_name(field: str, value: object) -> None:
    names = {"kv_source_layer_ids": "source_layer_ids", "rope_scaling": "rope_parameters"}
    with pytest.raises(ConfigError, match=names.get(field, field)) as caught:
        read(changed(**{field: value}))
    assert "text_config." in str(caught.value)


def test_a_v4_schedule_is_not_read_as_v41_nor_the_other_way_round() -> None:
    values = released.official()
    values["model_type"] = "deepseek_v4"
    with pytest.raises(ConfigError):
        read(values)
    values["model_type"] = "deepseek_v42"
    with pytest.raises(ConfigError, match=r"deepseek_v4, deepseek_v41"):
        read(values)
