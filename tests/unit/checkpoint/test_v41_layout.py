"""The V4.1 layout, tensor for tensor, its presets, tokenizer and headers (spec v41 2, 10.1)."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from spyglass.checkpoint.match import match
from spyglass.checkpoint.random import new_checkpoint
from spyglass.checkpoint.safetensors import DTYPE_BYTES, open_checkpoint
from spyglass.config import parse_model_config, read_model_config
from spyglass.config.presets import preset_config
from spyglass.engram import hash_constants, open_engram
from spyglass.params.hf_names import to_hf, to_native
from spyglass.params.table import component_of, draft_kind, draft_params, param_table, stored_tensors
from spyglass.prompt.tokenizer import load_tokenizer
from spyglass.quant.codec import decode
from spyglass.quant.formats import fp8
from spyglass.quant.packed import Packed
from tests.engram_values import values
from tests.unit.config import v41_released as released

Stored = dict[str, tuple[str, tuple[int, ...]]]


@cache
def flash() -> Stored:
    """Every tensor of the released shape: name to dtype and stored shape."""
    config = parse_model_config(released.official(), "released")
    specs = param_table(config) | draft_params(config, "dspark")
    return {
        tensor: (dtype, shape)
        for name, spec in specs.items()
        for tensor, dtype, shape in stored_tensors(name, spec, spec.format)
    }


def nbytes(name: str) -> int:
    dtype, shape = flash()[name]
    return DTYPE_BYTES[dtype] * math.prod(shape)


def test_totals_by_dtype() -> None:
    assert len(flash()) == 96_085 and sum(map(nbytes, flash())) == 510_286_023_000
    counts, sizes = Counter(dtype for dtype, _ in flash().values()), Counter[str]()
    for name, (dtype, _) in flash().items():
        sizes[dtype] += nbytes(name)
    assert counts == {"I8": 47_232, "F8_E4M3": 357, "F8_E8M0": 47_589, "BF16": 520, "F32": 387}
    assert sizes == {
        "I8": 278_585_671_680,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
    }


def test_totals_by_part() -> None:
    def total(*groups: str) -> tuple[int, int]:
        names = [name for name in flash() if component_of(name) in groups]
        return len(names), sum(map(nbytes, names))

    assert total("engram") == (4, 202_758_032_400)
    assert total("vision", "aligner", "image") == (266, 970_536_960)
    assert total("draft")[1] == pytest.approx(7.93e9, rel=1e-3)
    routed = [name for name in flash() if name.startswith("layers.7.ffn.experts.")]
    assert sum(map(nbytes, routed)) == 384 * (17_694_720 + 1_105_920) == pytest.approx(7.22e9, rel=1e-3)
    shared = [name for name in flash() if name.startswith("layers.7.ffn.shared_experts.")]
    assert sum(map(nbytes, shared)) == pytest.approx(35.4e6, rel=2e-3)
    assert nbytes("embed.weight") + nbytes("head.weight") == pytest.approx(2.65e9, rel=1e-3)


def test_printed_sizes_of_a_layer() -> None:
    """Spec v41 2.3, in megabytes, without scales."""

    def megabytes(*prefixes: str) -> float:
        return sum(nbytes(name) for name in flash() if name.startswith(prefixes)) / 1e6

    matrices = {"wq_a": 6.6, "wq_b": 41.9, "wkv": 2.6, "wo_a": 33.6, "wo_b": 41.9}
    for name, printed in matrices.items():
        assert megabytes(f"layers.7.attn.{name}.weight") == pytest.approx(printed, abs=0.06), name
    assert megabytes(*(f"layers.7.attn.{name}.weight" for name in matrices)) == pytest.approx(126.6, abs=0.2)
    assert megabytes("layers.7.hc_") == pytest.approx(3.9, abs=0.06)
    assert megabytes("layers.7.ffn.gate.weight") == pytest.approx(3.9, abs=0.06)
    assert sum(nbytes(name) for name in flash() if name.startswith("layers.") and ".engram." not in name) == (
        pytest.approx(296e9, rel=2e-3)
    )


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.0.attn.wq_a.weight", "F8_E4M3", (1280, 5120)),
        ("layers.0.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.2.attn.compressor.wgate.weight", "BF16", (512, 5120)),
        ("layers.20.attn.indexer.wk.weight", "BF16", (128, 512)),
        ("layers.20.attn.indexer.k_norm.weight", "BF16", (128,)),
        ("layers.36.attn.indexer.wq_b.scale", "F8_E8M0", (128, 40)),
        ("layers.36.attn.indexer.weights_proj.weight", "BF16", (32, 5120)),
        ("layers.39.hc_ffn_fn", "F32", (24, 20480)),
        ("layers.0.ffn.gate.bias_vl", "F32", (384,)),
        ("layers.0.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.0.ffn.experts.383.w1.scale", "F8_E8M0", (2304, 160)),
        ("layers.14.engram.embed.weight", "F8_E4M3", (384016682, 256)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.1.engram.wkv.weight", "F8_E4M3", (25600, 6144)),
        ("layers.1.engram.wkv.scale", "F8_E8M0", (800, 192)),
        ("layers.1.engram.q_weight", "BF16", (4, 5120)),
        ("mtp.0.main_proj.scale", "F8_E8M0", (160, 480)),
        ("mtp.1.ffn.gate.bias_vl", "F32", (128,)),
        ("mtp.2.markov_head.embed.weight", "BF16", (129280, 256)),
        ("mtp.2.markov_head.head.weight", "BF16", (129280, 256)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
    ],
)
def test_printed_shapes(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    assert flash()[name] == (dtype, shape)


def test_what_v41_does_not_have() -> None:
    def with_part(part: str) -> list[str]:
        return [name for name in flash() if part in name]

    for part in ("tid2eid", ".ape", "hc_head", "image_pad", "mtp.0.embed", "mtp.2.head.", "indexer.compressor"):
        assert not with_part(part), part
    assert "layers.20.attn.compressor.wgate.weight" not in flash()
    assert {name.split(".")[1] for name in with_part("compressor.norm")} == {"2", "8", "14", "20"}
    assert {name.split(".")[1] for name in with_part("indexer.wk.")} == {"2", "8", "14", "20"}
    assert {name.split(".")[1] for name in with_part("indexer.wq_b.weight")} == {
        "2", "8", "14", "20", "24", "28", "32", "36",
    }  # fmt: skip
    assert draft_kind(flash()) == "dspark"


def test_real_bytes_decode_to_the_printed_values() -> None:
    codes = torch.tensor([[0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5]], dtype=torch.uint8)
    scale = torch.tensor([[0x73]], dtype=torch.uint8)
    packed = Packed(fp8((32, 32)), codes.view(torch.float8_e4m3fn), scale, (1, 8))
    printed = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    assert decode(packed)[0].tolist() == printed


def test_the_flash_preset_is_the_released_configuration() -> None:
    assert preset_config("v41-flash", packed=True) == released.official()
    assert "quantization_config" not in preset_config("v41-flash", packed=False)


@pytest.mark.parametrize("preset", ["tiny-v41", "mini-v41", "v41-flash"])
def test_presets_have_the_table_sizes_of_their_primes(preset: str) -> None:
    config = parse_model_config(preset_config(preset, packed=True), preset)  # type: ignore[arg-type]
    assert config.text.engram is not None and config.vision is not None
    assert len(hash_constants(config.text.engram)) == 2
    roles = {(plan.kv_from == plan.index, plan.index_from == plan.index) for plan in config.text.layers if plan.ratio}
    assert roles == {(True, True), (False, True), (False, False)}, "full, reindex and reuse layers"


@pytest.fixture(scope="module")
def tiny(checkpoint_of: Callable[..., Path]) -> dict[str, Path]:
    return {form: checkpoint_of("tiny-v41", seed=3, format=form) for form in ("packed", "bf16")}


def test_a_new_checkpoint_holds_exactly_what_its_configuration_promises(tiny: dict[str, Path]) -> None:
    for form in ("packed", "bf16"):
        config = read_model_config(tiny[form])
        found = match(open_checkpoint(tiny[form]), param_table(config))
        assert not found.faults() and not found.at_init
        assert sum(name.endswith("engram.embed") for name in found.sources) == 2


def test_packed_and_plain_tables_of_one_seed_hold_the_same_rows(tiny: dict[str, Path]) -> None:
    stores = [open_engram(tiny[form], read_model_config(tiny[form])) for form in ("packed", "bf16")]
    for layer in (1, 3):
        first, second = (values(store.tables[layer]) for store in stores)
        assert (first == second).all() and 0.5 < first.std() < 1.0
    assert stores[0].tables[1].scale is not None and stores[1].tables[1].scale is None


def test_the_tokenizer_gets_the_two_names_and_keeps_its_classes(tiny: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(tiny["packed"])
    assert tokenizer is not None
    assert tokenizer.special_id("<｜System｜>") == 128799
    assert tokenizer.special_id("<｜deepseek_image｜>") == 129264
    assert tokenizer.special_id("<｜image｜>") == 129279
    printed = {"<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1, "<｜▁pad▁｜>": 2, "<｜User｜>": 128803}
    printed |= {"<｜Assistant｜>": 128804, "<think>": 128821, "</think>": 128822, "｜DSML｜": 128825}
    printed |= {"<｜latest_reminder｜>": 128828, "<｜action｜>": 128829}
    tags = {"box": 129276, "point": 129274, "polygon": 129272, "ref": 129278}
    printed |= {f"<｜{tag}｜>": first for tag, first in tags.items()}
    printed |= {f"<｜/{tag}｜>": first - 1 for tag, first in tags.items()}
    assert {spelling: tokenizer.special_id(spelling) for spelling in printed} == printed
    store = open_engram(tiny["packed"], read_model_config(tiny["packed"]))
    assert hashlib.sha256(store.classes_V.astype("<i4").tobytes()).hexdigest() == (
        "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"
    )


@pytest.mark.slow
def test_headers_only_writes_the_released_headers_with_the_tables_last(tmp_path: Path) -> None:
    layout = new_checkpoint(tmp_path, "v41-flash", headers_only=True)
    assert layout.nbytes == 510_286_023_000
    checkpoint = open_checkpoint(tmp_path)
    assert {name: (header.dtype, header.shape) for name, header in checkpoint.tensors.items()} == flash()
    config = read_model_config(tmp_path)
    everything = param_table(config) | draft_params(config, "dspark")
    assert not match(checkpoint, everything, skip=frozenset()).faults()
    assert len(match(checkpoint, param_table(config)).skipped["draft"]) == 2_401
    tables = [checkpoint.tensors[f"layers.{layer}.engram.embed.weight"].file.name for layer in (1, 14)]
    assert tables == [shard.file for shard in layout.shards[-2:]]


def test_the_tables_are_named_and_left_on_disk_when_a_model_loads(tiny: dict[str, Path]) -> None:
    from spyglass.model import load_model

    loaded = load_model(tiny["packed"], progress=False)
    expected = {f"layers.{layer}.engram.embed.{part}" for layer in (1, 3) for part in ("weight", "scale")}
    assert set(loaded.report.skipped["engram"]) == expected
    assert loaded.numerics == "reference"


def test_names_round_trip_and_the_converters_aliases_are_read() -> None:
    assert all(to_native(to_hf(name)) == name for name in flash())
    for alias, native in {
        "model.layers.1.self_attn.wq_a.weight_scale_inv": "layers.1.attn.wq_a.scale",
        "model.layers.3.mlp.experts.4.w1.weight": "layers.3.ffn.experts.4.w1.weight",
        "layers.3.mlp.experts.4.w2.weight_scale_inv": "layers.3.ffn.experts.4.w2.scale",
        "model.layers.3.mlp.gate.e_score_correction_bias": "layers.3.ffn.gate.bias",
        "layers.3.mlp.shared_experts.w2.weight_scale_inv": "layers.3.ffn.shared_experts.w2.scale",
        "layers.20.self_attn.indexer.wk.weight": "layers.20.attn.indexer.wk.weight",
        "model.layers.1.engram.embed.weight_scale_inv": "layers.1.engram.embed.scale",
        "mtp.2.markov_head.head.weight": "mtp.2.markov_head.head.weight",
    }.items():
        assert to_native(alias) == native and native in flash()


def test_a_checkpoint_in_transformers_spelling_loads(tmp_path: Path) -> None:
    new_checkpoint(tmp_path, "tiny-v41", names="hf", headers_only=True)
    assert not match(open_checkpoint(tmp_path), param_table(read_model_config(tmp_path))).faults()
