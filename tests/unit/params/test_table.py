"""The layout of the released checkpoint, tensor for tensor (spec v4 2.1-2.2)."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import pytest

from spyglass.checkpoint.safetensors import DTYPE_BYTES
from spyglass.config.presets import preset_config
from spyglass.config.read import parse_model_config
from spyglass.params.table import component_of, draft_kind, draft_params, param_table, stored_tensors
from tests.small_models import SMALL

Stored = dict[str, tuple[str, tuple[int, ...]]]


@cache
def flash_vision() -> Stored:
    """Every tensor of the released shape: name to dtype and stored shape."""
    config = parse_model_config(preset_config("flash-vision", packed=True), "flash-vision")
    specs = param_table(config) | draft_params(config, "dspark")
    return {
        tensor: (dtype, shape)
        for name, spec in specs.items()
        for tensor, dtype, shape in stored_tensors(name, spec, spec.format)
    }


def elements(name: str) -> int:
    return math.prod(flash_vision()[name][1])


def nbytes(name: str) -> int:
    return DTYPE_BYTES[flash_vision()[name][0]] * elements(name)


def total(prefix: str) -> tuple[int, int]:
    names = [name for name in flash_vision() if name.startswith(prefix)]
    return len(names), sum(map(nbytes, names))


def test_totals() -> None:
    assert total("") == (72_633, 167_811_372_792)


@pytest.mark.parametrize(
    ("group", "tensors", "size"),
    [
        ("text", 67_658, 156_015_745_244),
        ("draft", 4_708, 10_862_841_372),
        ("vision", 259, 823_685_120),
        ("aligner", 4, 109_068_288),
        ("image", 4, 32_768),
    ],
)
def test_groups(group: str, tensors: int, size: int) -> None:
    names = [name for name in flash_vision() if component_of(name) == group]
    assert (len(names), sum(map(nbytes, names))) == (tensors, size)


@pytest.mark.parametrize(
    ("dtype", "tensors", "count", "size"),
    [
        ("BF16", 712, 1_949_960_576, 3_899_921_152),
        ("F32", 482, 37_754_174, 151_016_696),
        ("F8_E4M3", 390, 6_304_038_912, 6_304_038_912),
        ("F8_E8M0", 35_718, 9_261_408_000, 9_261_408_000),
        ("I8", 35_328, 148_176_371_712, 148_176_371_712),
        ("I64", 3, 2_327_040, 18_616_320),
    ],
)
def test_dtypes(dtype: str, tensors: int, count: int, size: int) -> None:
    names = [name for name, (found, _) in flash_vision().items() if found == dtype]
    assert (len(names), sum(map(elements, names)), sum(map(nbytes, names))) == (tensors, count, size)


@pytest.mark.parametrize(
    ("prefix", "tensors", "size"),
    [
        ("layers.0.", 1567, 3_566_151_000),
        ("layers.1.", 1567, 3_566_151_000),
        ("layers.2.", 1578, 3_596_057_688),
        ("layers.3.", 1570, 3_568_597_336),
        ("layers.4.", 1577, 3_589_852_248),
        ("layers.42.", 1577, 3_589_852_248),
        ("mtp.0.", None, 3_610_288_472),
        ("mtp.1.", None, 3_559_945_560),
        ("mtp.2.", None, 3_692_607_340),
        ("layers.7.ffn.experts.", 1536, 3_422_552_064),
        ("layers.7.ffn.experts.200.", 6, 13_369_344),
    ],
)
def test_layers(prefix: str, tensors: int | None, size: int) -> None:
    found = total(prefix)
    assert found[1] == size and tensors in (None, found[0])


def test_embedding_and_head() -> None:
    assert nbytes("embed.weight") + nbytes("head.weight") == 2_118_123_520


# Every row of the tables of spec v4 2.2.
PRINTED: Stored = {
    "embed.weight": ("BF16", (129280, 4096)),
    "head.weight": ("BF16", (129280, 4096)),
    "norm.weight": ("BF16", (4096,)),
    "hc_head_fn": ("F32", (4, 16384)),
    "hc_head_base": ("F32", (4,)),
    "hc_head_scale": ("F32", (1,)),
    "image_start": ("BF16", (4096,)),
    "image_end": ("BF16", (4096,)),
    "image_newline": ("BF16", (4096,)),
    "image_pad": ("BF16", (4096,)),
    "layers.5.attn_norm.weight": ("BF16", (4096,)),
    "layers.5.ffn_norm.weight": ("BF16", (4096,)),
    "layers.5.hc_attn_fn": ("F32", (24, 16384)),
    "layers.5.hc_ffn_fn": ("F32", (24, 16384)),
    "layers.5.hc_attn_base": ("F32", (24,)),
    "layers.5.hc_ffn_base": ("F32", (24,)),
    "layers.5.hc_attn_scale": ("F32", (3,)),
    "layers.5.hc_ffn_scale": ("F32", (3,)),
    "layers.5.attn.attn_sink": ("F32", (64,)),
    "layers.5.attn.wq_a.weight": ("F8_E4M3", (1024, 4096)),
    "layers.5.attn.wq_a.scale": ("F8_E8M0", (8, 32)),
    "layers.5.attn.q_norm.weight": ("BF16", (1024,)),
    "layers.5.attn.wq_b.weight": ("F8_E4M3", (32768, 1024)),
    "layers.5.attn.wq_b.scale": ("F8_E8M0", (256, 8)),
    "layers.5.attn.wkv.weight": ("F8_E4M3", (512, 4096)),
    "layers.5.attn.wkv.scale": ("F8_E8M0", (4, 32)),
    "layers.5.attn.kv_norm.weight": ("BF16", (512,)),
    "layers.5.attn.wo_a.weight": ("F8_E4M3", (8192, 4096)),
    "layers.5.attn.wo_a.scale": ("F8_E8M0", (64, 32)),
    "layers.5.attn.wo_b.weight": ("F8_E4M3", (4096, 8192)),
    "layers.5.attn.wo_b.scale": ("F8_E8M0", (32, 64)),
    "layers.5.ffn.gate.weight": ("BF16", (256, 4096)),
    "layers.0.ffn.gate.bias": ("F32", (256,)),
    "layers.5.ffn.gate.bias": ("F32", (256,)),
    "layers.0.ffn.gate.bias_vl": ("F32", (256,)),
    "layers.42.ffn.gate.bias_vl": ("F32", (256,)),
    "mtp.2.ffn.gate.bias_vl": ("F32", (256,)),
    "layers.2.ffn.gate.tid2eid": ("I64", (129280, 6)),
    "layers.5.ffn.experts.255.w1.weight": ("I8", (2048, 2048)),
    "layers.5.ffn.experts.255.w3.weight": ("I8", (2048, 2048)),
    "layers.5.ffn.experts.255.w1.scale": ("F8_E8M0", (2048, 128)),
    "layers.5.ffn.experts.255.w3.scale": ("F8_E8M0", (2048, 128)),
    "layers.5.ffn.experts.255.w2.weight": ("I8", (4096, 1024)),
    "layers.5.ffn.experts.255.w2.scale": ("F8_E8M0", (4096, 64)),
    "layers.5.ffn.shared_experts.w1.weight": ("F8_E4M3", (2048, 4096)),
    "layers.5.ffn.shared_experts.w3.weight": ("F8_E4M3", (2048, 4096)),
    "layers.5.ffn.shared_experts.w1.scale": ("F8_E8M0", (16, 32)),
    "layers.5.ffn.shared_experts.w3.scale": ("F8_E8M0", (16, 32)),
    "layers.5.ffn.shared_experts.w2.weight": ("F8_E4M3", (4096, 2048)),
    "layers.5.ffn.shared_experts.w2.scale": ("F8_E8M0", (32, 16)),
    "layers.4.attn.compressor.ape": ("F32", (4, 1024)),
    "layers.4.attn.compressor.wkv.weight": ("BF16", (1024, 4096)),
    "layers.4.attn.compressor.wgate.weight": ("BF16", (1024, 4096)),
    "layers.4.attn.compressor.norm.weight": ("BF16", (512,)),
    "layers.4.attn.indexer.wq_b.weight": ("F8_E4M3", (8192, 1024)),
    "layers.4.attn.indexer.wq_b.scale": ("F8_E8M0", (64, 8)),
    "layers.4.attn.indexer.weights_proj.weight": ("BF16", (64, 4096)),
    "layers.4.attn.indexer.compressor.ape": ("F32", (4, 256)),
    "layers.4.attn.indexer.compressor.wkv.weight": ("BF16", (256, 4096)),
    "layers.4.attn.indexer.compressor.wgate.weight": ("BF16", (256, 4096)),
    "layers.4.attn.indexer.compressor.norm.weight": ("BF16", (128,)),
    "layers.5.attn.compressor.ape": ("F32", (128, 512)),
    "layers.5.attn.compressor.wkv.weight": ("BF16", (512, 4096)),
    "layers.5.attn.compressor.wgate.weight": ("BF16", (512, 4096)),
    "layers.5.attn.compressor.norm.weight": ("BF16", (512,)),
    "mtp.0.main_proj.weight": ("F8_E4M3", (4096, 12288)),
    "mtp.0.main_proj.scale": ("F8_E8M0", (32, 96)),
    "mtp.0.main_norm.weight": ("BF16", (4096,)),
    "mtp.2.norm.weight": ("BF16", (4096,)),
    "mtp.2.hc_head_fn": ("F32", (4, 16384)),
    "mtp.2.hc_head_base": ("F32", (4,)),
    "mtp.2.hc_head_scale": ("F32", (1,)),
    "mtp.2.markov_head.markov_w1.weight": ("BF16", (129280, 256)),
    "mtp.2.markov_head.markov_w2.weight": ("BF16", (129280, 256)),
    "mtp.2.confidence_head.proj.weight": ("BF16", (1, 4352)),
    "vision.patch_embed.proj.weight": ("BF16", (1024, 588)),
    "vision.patch_embed.proj.bias": ("BF16", (1024,)),
    "vision.blocks.31.norm1.weight": ("BF16", (1024,)),
    "vision.blocks.31.norm2.weight": ("BF16", (1024,)),
    "vision.blocks.31.attn.wqkv.weight": ("BF16", (3072, 1024)),
    "vision.blocks.31.attn.wqkv.bias": ("BF16", (3072,)),
    "vision.blocks.31.attn.wo.weight": ("BF16", (1024, 1024)),
    "vision.blocks.31.attn.wo.bias": ("BF16", (1024,)),
    "vision.blocks.31.mlp.w1.weight": ("BF16", (5632, 1024)),
    "vision.blocks.31.mlp.w2.weight": ("BF16", (1024, 2816)),
    "vision.norm.weight": ("BF16", (1024,)),
    "aligner.w1.weight": ("BF16", (4096, 9216)),
    "aligner.w1.bias": ("BF16", (4096,)),
    "aligner.w2.weight": ("BF16", (4096, 4096)),
    "aligner.w2.bias": ("BF16", (4096,)),
}


def test_printed_tensors() -> None:
    found = flash_vision()
    assert {name: found.get(name) for name in PRINTED} == PRINTED


def test_there_is_nothing_the_tables_do_not_print() -> None:
    """Every kind of tensor (indices removed) occurs in the printed tables."""

    def kind(name: str) -> str:
        return ".".join("N" if part.isdecimal() else part for part in name.split("."))

    printed = Counter(map(kind, PRINTED))
    unprinted = {kind(name) for name in flash_vision() if not name.startswith("mtp.")} - set(printed)
    assert not unprinted
    stages = {kind(name).removeprefix("mtp.N.") for name in flash_vision() if name.startswith("mtp.")}
    layer = {kind(name).removeprefix("layers.N.") for name in flash_vision() if name.startswith("layers.0.")}
    extra = stages - layer
    assert {f"mtp.N.{name}" for name in extra} == {name for name in printed if name.startswith("mtp.")} - {
        "mtp.N.ffn.gate.bias_vl"
    }
    assert layer - stages == {"ffn.gate.tid2eid"}


def test_text_models_have_no_tower_and_no_picture_bias() -> None:
    specs = param_table(parse_model_config({**SMALL, "vision_n_layers": 0}, "small"))
    assert {spec.component for spec in specs.values()} == {"text"}
    assert not [name for name in specs if name.endswith("bias_vl")]


def test_only_the_bias_that_hash_layers_never_read_may_be_absent() -> None:
    specs = param_table(parse_model_config(SMALL, "small"))
    assert [name for name, spec in specs.items() if spec.optional] == ["layers.0.ffn.gate.bias"]


def test_base_models_store_experts_as_fp8_with_float32_scales() -> None:
    config = parse_model_config({**preset_config("tiny", packed=True), "expert_dtype": "fp8"}, "base")
    spec = param_table(config)["layers.1.ffn.experts.0.w1"]
    tensors = stored_tensors("w1", spec, spec.format)
    assert [(dtype, shape) for _, dtype, shape in tensors] == [("F8_E4M3", (128, 128)), ("F32", (1, 1))]


def test_unpacked_checkpoints_are_bfloat16_throughout() -> None:
    specs = param_table(parse_model_config(preset_config("tiny", packed=False), "tiny"))
    assert {str(spec.format) for spec in specs.values() if spec.kind == "matrix"} == {"bf16"}


def test_classic_draft_stage() -> None:
    config = parse_model_config({**SMALL, "num_nextn_predict_layers": 1, "compress_ratios": [0, 4, 128, 4, 0]}, "small")
    specs = draft_params(config, "classic")
    width, streams = SMALL["hidden_size"], SMALL["hc_mult"]
    assert specs["mtp.0.e_proj"].shape == specs["mtp.0.h_proj"].shape == (width, width)
    assert specs["mtp.0.enorm.weight"].shape == specs["mtp.0.hnorm.weight"].shape == (width,)
    assert specs["mtp.0.norm.weight"].shape == (width,)
    assert specs["mtp.0.hc_head_fn"].shape == (streams, streams * width)
    assert "mtp.0.attn.wq_a" in specs and "mtp.0.ffn.gate.tid2eid" not in specs and "mtp.0.main_proj" not in specs


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["layers.0.attn.wq_a.weight", "mtp.0.attn.wq_a.weight", "mtp.0.main_proj.scale"], "dspark"),
        (["mtp.0.e_proj.weight"], "classic"),
        (["mtp.0.attn.wq_a.weight", "layers.0.main_proj.weight"], None),
    ],
)
def test_draft_kind_is_told_by_names(names: list[str], kind: str | None) -> None:
    assert draft_kind(names) == kind
