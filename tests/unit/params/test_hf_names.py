"""Native and Transformers names are one reversible table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spyglass.checkpoint.layout import plan_layout
from spyglass.config.read import parse_model_config
from spyglass.params.hf_names import LAYER, TOP_LEVEL, from_stacked, to_hf, to_native, to_stacked
from spyglass.params.table import param_table
from tests.unit.params.test_table import flash_vision

INDEXER = "model.layers.4.self_attn.compressor.indexer"
# spec v4 2.3, and the modules of transformers' own model
KNOWN = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_scale": "model.hc_head.hc_scale",
    "layers.3.attn_norm.weight": "model.layers.3.input_layernorm.weight",
    "layers.3.ffn_norm.weight": "model.layers.3.post_attention_layernorm.weight",
    "layers.3.hc_attn_fn": "model.layers.3.attn_hc.fn",
    "layers.3.hc_ffn_scale": "model.layers.3.ffn_hc.scale",
    "layers.3.attn.attn_sink": "model.layers.3.self_attn.sinks",
    "layers.3.attn.wq_a.weight": "model.layers.3.self_attn.q_a_proj.weight",
    "layers.3.attn.wq_a.scale": "model.layers.3.self_attn.q_a_proj.weight_scale_inv",
    "layers.3.attn.q_norm.weight": "model.layers.3.self_attn.q_a_norm.weight",
    "layers.3.attn.wq_b.weight": "model.layers.3.self_attn.q_b_proj.weight",
    "layers.3.attn.wkv.weight": "model.layers.3.self_attn.kv_proj.weight",
    "layers.3.attn.kv_norm.weight": "model.layers.3.self_attn.kv_norm.weight",
    "layers.3.attn.wo_a.weight": "model.layers.3.self_attn.o_a_proj.weight",
    "layers.3.attn.wo_b.scale": "model.layers.3.self_attn.o_b_proj.weight_scale_inv",
    "layers.4.attn.compressor.ape": "model.layers.4.self_attn.compressor.position_bias",
    "layers.4.attn.compressor.wkv.weight": "model.layers.4.self_attn.compressor.kv_proj.weight",
    "layers.4.attn.compressor.wgate.weight": "model.layers.4.self_attn.compressor.gate_proj.weight",
    "layers.4.attn.compressor.norm.weight": "model.layers.4.self_attn.compressor.kv_norm.weight",
    "layers.4.attn.indexer.wq_b.weight": f"{INDEXER}.q_b_proj.weight",
    "layers.4.attn.indexer.weights_proj.weight": f"{INDEXER}.scorer.weights_proj.weight",
    "layers.4.attn.indexer.compressor.ape": f"{INDEXER}.position_bias",
    "layers.4.attn.indexer.compressor.wkv.weight": f"{INDEXER}.kv_proj.weight",
    "layers.4.attn.indexer.compressor.norm.weight": f"{INDEXER}.kv_norm.weight",
    "layers.3.ffn.gate.weight": "model.layers.3.mlp.gate.weight",
    "layers.3.ffn.gate.bias": "model.layers.3.mlp.gate.e_score_correction_bias",
    "layers.3.ffn.gate.tid2eid": "model.layers.3.mlp.gate.tid2eid",
    "layers.3.ffn.shared_experts.w1.weight": "model.layers.3.mlp.shared_experts.gate_proj.weight",
    "layers.3.ffn.shared_experts.w2.weight": "model.layers.3.mlp.shared_experts.down_proj.weight",
    "layers.3.ffn.shared_experts.w3.weight": "model.layers.3.mlp.shared_experts.up_proj.weight",
    "layers.3.ffn.experts.17.w1.weight": "model.layers.3.mlp.experts.17.gate_proj.weight",
    "layers.3.ffn.experts.17.w2.scale": "model.layers.3.mlp.experts.17.down_proj.weight_scale_inv",
    "layers.3.attn.wq_a": "model.layers.3.self_attn.q_a_proj",
    "vision.blocks.3.mlp.w1.weight": "model.vision.blocks.3.mlp.w1.weight",
    "aligner.w1.weight": "model.aligner.w1.weight",
    "image_start": "model.image_start",
    "mtp.2.markov_head.markov_w1.weight": "model.mtp.2.markov_head.markov_w1.weight",
    "mtp.2.norm.weight": "model.mtp.2.norm.weight",
}


@pytest.mark.parametrize(("native", "hf"), KNOWN.items())
def test_known_names(native: str, hf: str) -> None:
    assert (to_hf(native), to_native(hf)) == (hf, native)


def test_every_name_round_trips() -> None:
    names = list(flash_vision())
    translated = [to_hf(name) for name in names]
    assert len(set(translated)) == len(names)
    assert [to_native(name) for name in translated] == names


def test_native_names_are_left_alone() -> None:
    assert all(to_native(name) == name for name in flash_vision())


def test_every_row_of_the_table_is_used() -> None:
    used = {name.removesuffix(".weight").removesuffix(".scale") for name in flash_vision()}
    assert set(TOP_LEVEL) <= used
    assert set(LAYER) <= {name.split(".", 2)[-1] for name in used}


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model.", ""])
def test_wrappers_put_other_prefixes_before_the_same_names(prefix: str) -> None:
    assert to_native(f"{prefix}layers.3.self_attn.q_a_proj.weight") == "layers.3.attn.wq_a.weight"
    assert to_native(f"{prefix}embed_tokens.weight") == "embed.weight"
    assert to_native("language_model.lm_head.weight") == "head.weight"


def test_endings_that_look_alike_are_not_confused() -> None:
    """Suffix rules would turn a Markov head into the output head and the aligner into an expert (spec v4 12.2)."""
    assert to_native("lm_head.weight") == "head.weight"
    for name in ("mtp.2.markov_head.head.weight", "aligner.w1.weight", "vision.blocks.0.mlp.w1.weight", "image_pad"):
        assert to_stacked(name) is None
        assert to_native(to_hf(name)) == name != "head.weight"
    assert to_stacked("layers.0.ffn.shared_experts.w1.weight") is None
    assert to_hf("layers.0.hc_attn_scale") == "model.layers.0.attn_hc.scale"
    assert to_native("model.layers.0.attn_hc.scale") == "layers.0.hc_attn_scale"


def test_stacked_experts_have_w1_before_w3_and_experts_one_after_another() -> None:
    parts = from_stacked("model.layers.3.mlp.experts.gate_up_proj", 2)
    assert [name for name, _ in parts] == [
        "layers.3.ffn.experts.0.w1.weight",
        "layers.3.ffn.experts.0.w3.weight",
        "layers.3.ffn.experts.1.w1.weight",
        "layers.3.ffn.experts.1.w3.weight",
    ]
    assert [(part.expert, part.part, part.parts) for _, part in parts] == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    scales = from_stacked("layers.3.mlp.experts.down_proj_scale_inv", 1)
    assert [name for name, _ in scales] == ["layers.3.ffn.experts.0.w2.scale"]


def test_stacking_is_reversible_for_every_expert_tensor() -> None:
    experts = [name for name in flash_vision() if ".ffn.experts." in name and name.startswith(("layers.7.", "mtp.0."))]
    stacks = {part.name for name in experts if (part := to_stacked(name)) is not None}
    assert stacks == {
        f"model.{layer}.mlp.experts.{stack}"
        for layer in ("layers.7", "mtp.0")
        for stack in ("gate_up_proj", "down_proj", "gate_up_proj_scale_inv", "down_proj_scale_inv")
    }
    back = {name: part for stack in stacks for name, part in from_stacked(stack, 256)}
    assert back == {name: to_stacked(name) for name in experts}


@pytest.mark.parametrize(
    "name",
    ["model.layers.3.mlp.experts.gate_up_proj.bias", "model.layers.3.mlp.experts.7.gate_proj.weight", "lm_head.weight"],
)
def test_other_names_are_no_stacks(name: str) -> None:
    assert from_stacked(name, 4) == []


def test_transformers_own_model_has_these_names_and_shapes(golden: Path) -> None:
    """All of them, stacked experts included; it only has no place for the bias that hash layers never read."""
    theirs = json.loads((golden / "v4" / "transformers_names.json").read_text())
    values = json.loads((golden / "configs" / "v4-text.json").read_text())
    specs = param_table(parse_model_config(values, "v4-text"))
    layout = plan_layout([(name, spec, spec.format) for name, spec in specs.items()], names="hf")
    ours = {place.tensor.name: list(place.tensor.shape) for _, place in layout.places.values()}
    assert ours.pop("model.layers.0.mlp.gate.e_score_correction_bias") == [8]
    assert ours == theirs


def test_what_transformers_does_not_name_keeps_its_native_name() -> None:
    """Scales too: `engram.wkv.scale` is not `weight_scale_inv`, in no spelling."""
    for name in ("layers.1.engram.wkv.scale", "layers.1.engram.embed.weight", "layers.4.attn.indexer.wk.weight"):
        assert to_hf(name) == f"model.{name}" and to_native(f"model.{name}") == name
