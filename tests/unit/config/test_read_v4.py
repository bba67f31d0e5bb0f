"""The V4 dialects of config.json: what each family member becomes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spyglass.config import (
    CompressorPlan,
    LayerPlan,
    ModelConfig,
    RopeSpec,
    Rounding,
    VisionConfig,
    WeightQuant,
    YarnScaling,
    parse_model_config,
    read_model_config,
)
from spyglass.quant.formats import FakeQuant
from tests.unit.config.family_configs import MEMBERS, flash_first, flash_vision, pro, reference_flash_vision

YARN = YarnScaling(factor=16, original_max_position=65536, beta_fast=32, beta_slow=1)
NEAR = RopeSpec(theta=10000, dim=64, yarn=None)
FAR = RopeSpec(theta=160000, dim=64, yarn=YARN)


def parse(values: dict[str, Any]) -> ModelConfig:
    return parse_model_config(values, "config.json")


def test_the_vision_release_reads_as_the_specification_says() -> None:
    config = parse(flash_vision())
    text = config.text
    assert (text.vocab_size, text.hidden_size, text.num_hidden_layers, text.num_attention_heads) == (
        129280,
        4096,
        43,
        64,
    )
    assert (text.head_dim, text.layers[0].rope.dim, text.q_lora_rank, text.o_groups, text.o_lora_rank) == (
        512, 64, 1024, 8, 1024,
    )  # fmt: skip
    assert (text.sliding_window, text.index_n_heads, text.index_head_dim, text.index_topk) == (128, 64, 128, 512)
    assert (text.n_routed_experts, text.n_shared_experts, text.num_experts_per_tok) == (256, 1, 6)
    assert (text.moe_intermediate_size, text.routed_scaling_factor, text.swiglu_limit) == (2048, 1.5, 10.0)
    assert (text.hc_mult, text.hc_sinkhorn_iters, text.hc_eps, text.rms_norm_eps) == (4, 20, 1e-6, 1e-20)
    assert (text.q_head_norm, text.shifted_hyper, text.max_position_embeddings) == (True, False, 1048576)
    assert (config.family, config.bos_token_id, config.eos_token_ids) == ("deepseek_v4", 0, (1,))
    assert (config.pad_token_id, config.image_token_id, config.num_draft_layers) == (None, None, 3)
    assert config.weights == WeightQuant(block=(128, 128), expert_dtype="fp4")
    assert config.draft["dspark_target_layer_ids"] == [40, 41, 42]
    assert config.vision == VisionConfig(
        num_hidden_layers=32,
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=2816,
        patch_size=14,
        rope_theta=10000.0,
        downsample_ratio=3,
        max_tokens=384,
        min_pixels=147456,
        max_wh_ratio=8.0,
        layout="paired",
        norm_eps=1e-6,
    )


def test_released_models_round_where_they_were_trained_to() -> None:
    rows = FakeQuant(element="e4m3", block=64, scale="e8m0")
    assert parse(flash_vision()).text.reference_rounding == Rounding(
        linear=FakeQuant(element="e4m3", block=128, scale="e8m0"),
        window=rows,
        pool=rows,
        index=FakeQuant(element="e2m1", block=32, scale="e8m0"),
        hadamard=True,
        kv_dims=448,
        rope_dims_bf16=True,
    )


def layer(index: int, ratio: int, *, hashed: bool = False) -> LayerPlan:
    chosen = ratio == 4
    compressor = CompressorPlan(
        ratio=ratio, overlap=chosen, positional_bias=True, gated=True, index_keys="compressor" if chosen else None
    )
    return LayerPlan(
        index=index,
        ratio=ratio,
        rope=FAR if ratio else NEAR,
        compressor=compressor if ratio else None,
        kv_from=index if ratio else None,
        index_from=index if chosen else None,
        index_keys_from=index if chosen else None,
        candidates_from=None,
        router="hash" if hashed else "topk",
    )


def test_every_flash_layer_has_the_plan_its_ratio_asks_for() -> None:
    layers = parse(flash_vision()).text.layers
    assert layers[:5] == (
        layer(0, 0, hashed=True),
        layer(1, 0, hashed=True),
        layer(2, 4, hashed=True),
        layer(3, 128),
        layer(4, 4),
    )
    assert [item.index for item in layers] == list(range(43))
    assert [i for i, item in enumerate(layers) if item.ratio == 4] == list(range(2, 43, 2))
    assert [i for i, item in enumerate(layers) if item.ratio == 128] == list(range(3, 42, 2))
    assert all(item == layer(i, item.ratio) for i, item in enumerate(layers) if i > 2)


def test_a_pooled_row_reads_two_groups_only_where_groups_overlap() -> None:
    assert [parse(flash_vision()).text.layers[i].compressor.group_rows for i in (2, 3)] == [8, 128]  # type: ignore[union-attr]


@pytest.mark.parametrize("member", MEMBERS)
def test_every_family_member_loads(member: str) -> None:
    config = parse(MEMBERS[member]())
    assert (config.vision is not None) == (member == "flash-vision")
    assert config.num_draft_layers == (3 if member in ("flash-vision", "flash-0731") else 1)
    assert config.text.rms_norm_eps == (1e-20 if member == "flash-vision" else 1e-6)


def test_pro_differs_where_the_table_says() -> None:
    text = parse(pro()).text
    assert (text.hidden_size, text.num_hidden_layers, text.num_attention_heads, text.q_lora_rank) == (
        7168,
        61,
        128,
        1536,
    )
    assert (text.n_routed_experts, text.moe_intermediate_size, text.routed_scaling_factor) == (384, 3072, 2.5)
    assert (text.o_groups, text.o_lora_rank, text.index_topk) == (16, 1024, 1024)
    assert [item.ratio for item in text.layers] == [128, 128] + [4, 128] * 29 + [4]


def test_a_base_model_stores_its_experts_in_fp8() -> None:
    assert parse(MEMBERS["flash-base"]()).weights == WeightQuant(block=(128, 128), expert_dtype="fp8")


def test_the_reference_codes_file_means_the_same_model() -> None:
    official, reference = parse(flash_vision()), parse(reference_flash_vision())
    assert replace(reference, informational={}) == replace(official, informational={})


@pytest.mark.parametrize(("key", "field"), [("norm_eps", "rms_norm_eps"), ("hc_eps", "hc_eps")])
def test_the_reference_codes_defaults_hold_for_its_own_file_only(key: str, field: str) -> None:
    values = reference_flash_vision()
    values.pop(key, None)
    assert getattr(parse(values).text, field) == 1e-6


def test_draft_stages_are_counted_by_the_schedule_where_no_field_does() -> None:
    values = flash_first()
    del values["num_nextn_predict_layers"]
    assert parse(values).num_draft_layers == 1


@pytest.mark.parametrize("layers", [None, 0])
def test_only_vision_layers_above_zero_make_a_vision_model(layers: int | None) -> None:
    assert parse({**flash_vision(), "vision_n_layers": layers}).vision is None


def test_fields_that_no_computation_reads_are_kept_as_found() -> None:
    assert parse({**flash_vision(), "note": {"a": [1]}}).informational == {
        "architectures": ["DeepseekV4ForCausalLM"],
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1",
        "note": {"a": [1]},
    }


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"eos_token_id": [1, 7]}, {"eos_token_ids": (1, 7)}),
        ({"pad_token_id": 2, "image_token_id": 129264}, {"pad_token_id": 2, "image_token_id": 129264}),
        ({"quantization_config": None}, {"weights": None}),
    ],
)
def test_optional_fields_are_read(change: dict[str, Any], expected: dict[str, Any]) -> None:
    config = parse({**flash_vision(), **change})
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("ratio", [8, 8.0, None])
def test_the_width_limit_may_be_a_float_or_none(ratio: float | None) -> None:
    vision = parse({**flash_vision(), "vision_max_wh_ratio": ratio}).vision
    assert vision is not None
    assert vision.max_wh_ratio == ratio


def test_newer_spelling_of_the_rope_kind_is_understood() -> None:
    scaling = {key: value for key, value in flash_vision()["rope_scaling"].items() if key != "type"}
    config = parse({**flash_vision(), "rope_scaling": {**scaling, "rope_type": "yarn", "attention_factor": 1.0}})
    assert config == parse(flash_vision())


@pytest.mark.parametrize("name", ["mini-v4", "v4-sparse", "v4-text", "v4-text-packed", "v4-vision", "v4-vision-packed"])
def test_golden_configs_load(name: str, golden: Path, tmp_path: Path) -> None:
    source = (golden / "configs" / f"{name}.json").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(source, encoding="utf-8")
    config = read_model_config(tmp_path)
    assert (config.vision is not None) == ("vision" in name or "sparse" in name)
    assert (config.weights is not None) == name.endswith("packed")
    raw = json.loads(source)
    assert [item.ratio for item in config.text.layers] == raw["compress_ratios"]
    assert [config.text.sliding_window, config.text.index_topk] == [raw["sliding_window"], raw["index_topk"]]


def test_a_folder_with_only_the_reference_codes_file_loads(tmp_path: Path) -> None:
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "config.json").write_text(json.dumps(reference_flash_vision()), encoding="utf-8")
    assert read_model_config(tmp_path).text.hidden_size == 4096
    (tmp_path / "config.json").write_text(json.dumps({**flash_vision(), "hidden_size": 8192}), encoding="utf-8")
    assert read_model_config(tmp_path).text.hidden_size == 8192
