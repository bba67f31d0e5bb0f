"""The model's four parts, its tensors, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from spyglass.errors import CheckpointError, ConfigError, DeviceError, PromptError
from spyglass.model import VisionLanguageModel, find_device, load_model
from spyglass.ops.linear_merged.reference import linear_merged
from spyglass.quant.codec import encode
from spyglass.quant.formats import BF16, I64
from spyglass.quant.packed import Packed
from tests.driver import Memory, Part, build_step, prefill, text_tokens
from tests.small_models import (
    SMALL,
    build_model,
    empty_model,
    prompt_with_pictures,
    random_text,
    random_weights,
    small_config,
    small_model,
)
from tests.tolerance import assert_law

TEXT_ONLY = {key: value for key, value in SMALL.items() if not key.startswith("vision_")}


@pytest.fixture(scope="module")
def model() -> VisionLanguageModel:
    return small_model()


def one_step(model: VisionLanguageModel, tokens: Any) -> Any:
    text, dtype = model.config.text, model.options.build.dtype
    memory = Memory(text=text, dtype=dtype, sequences=1, length=len(tokens))
    return build_step(memory, [Part(sequence=0, tokens=tokens, start=0)])


def test_without_pictures_neither_tower_nor_picture_bias_is_part_of_the_model() -> None:
    names = {slot.name for slot in empty_model(small_config(), pictures=False).slots()}
    assert not [name for name in names if name.startswith(("vision.", "aligner.", "image_")) or "bias_vl" in name]


def test_the_parts_in_order_are_the_whole(model: VisionLanguageModel) -> None:
    tokens = prompt_with_pictures([5, (2, 6), 9], model.config)
    with torch.inference_mode():
        batch, cache, rows = one_step(model, tokens)
        hidden, _ = model.text(model.embed(batch, rows), batch, cache)
        wanted = torch.tensor([0, 7, len(tokens) - 1])
        logits = model.logits(hidden, wanted)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, prefill(model, tokens)[wanted])


def test_streams_start_as_equal_copies_and_every_kind_has_its_vector(model: VisionLanguageModel) -> None:
    tokens = prompt_with_pictures([2, (1, 4), 1], model.config)
    batch, _, rows = one_step(model, tokens)
    streams = model.embed(batch, rows)
    assert streams.shape == (len(tokens), 3, 48) and streams.is_contiguous()
    assert all(torch.equal(streams[:, 0], streams[:, m]) for m in range(3))
    vectors = {0: "image_start", 1: "image_pad", 3: "image_newline", 4: "image_end"}
    assert set(tokens.kinds_T.tolist()) == {-1, 0, 1, 2, 3, 4}
    for t, kind in enumerate(tokens.kinds_T.tolist()):
        if kind == -1:
            expected = model.embedding(torch.from_numpy(tokens.ids_T[t : t + 1]))[0]
        elif kind == 2:
            assert rows is not None
            expected = rows[tokens.image_row_T[t]]
        else:
            expected = model.learned[vectors[kind]].tensor()
        assert torch.equal(streams[t, 0], expected), (t, kind)


def test_captured_layers_are_their_output_streams(model: VisionLanguageModel) -> None:
    tokens = text_tokens(random_text(11))
    batch, cache, _ = one_step(model, tokens)
    batch = dataclasses.replace(batch, capture=(1, 3))
    with torch.inference_mode():
        hidden, captured = model.text(model.embed(batch), batch, cache)
        again = model.text.norm(model.text.hc_head(captured[3]))
    assert set(captured) == {1, 3} and captured[1].shape == (11, 3, 48)
    assert torch.equal(hidden, again)


def test_pictures_are_refused_where_there_is_no_tower() -> None:
    for options, message in (({"vision_n_layers": 0}, "no vision tower"), ({}, "loaded without its vision tower")):
        config = small_config(**options)
        model = empty_model(config, pictures=False)
        for slot in model.slots():
            slot.put(random_weights([slot])[slot.name] if slot.kind != "index" else table(slot.shape))
        tokens = prompt_with_pictures([2, (1, 4)], small_config())
        batch, _, rows = one_step(model, tokens)
        with pytest.raises(PromptError, match=message):
            model.embed(batch, rows)
        with pytest.raises(PromptError, match=message):
            model.encode_images(None)  # type: ignore[arg-type]


def table(shape: tuple[int, ...]) -> Packed:
    return Packed(I64, torch.zeros(shape, dtype=torch.int64), None, shape)


# --- loading ---


def write(folder: Path, values: dict[str, Any], packed: bool = False, leave_out: str = "\0") -> Path:
    """A checkpoint of seeded weights, without tensors whose name contains `leave_out`."""
    config = small_config(**{key: values.get(key, 0) for key in ("vision_n_layers",)})
    weights = random_weights(empty_model(config).slots(), packed=packed)
    tensors = {}
    for slot in empty_model(config).slots():
        name = f"{slot.name}.weight" if slot.kind == "matrix" else slot.name
        if leave_out in name:
            continue
        stored = weights[slot.name]
        tensors[name] = stored.data.view(torch.int8) if stored.format.name == "fp4" else stored.data
        if stored.scale is not None:
            tensors[f"{slot.name}.scale"] = stored.scale.view(torch.float8_e8m0fnu)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_loaded_model_is_the_one_built_in_memory(tmp_path: Path) -> None:
    loaded = load_model(write(tmp_path, SMALL), dtype="float32", ops="reference", expand=True, progress=False)
    tokens = prompt_with_pictures([5, (2, 6), 9], loaded.config)
    assert loaded.numerics == "plain" and loaded.dtype == torch.float32
    assert torch.equal(prefill(loaded.model, tokens), prefill(small_model(), tokens))


def test_auto_means_bf16_activations_and_the_rounding_that_the_weights_were_trained_with(tmp_path: Path) -> None:
    for packed, numerics in ((False, "plain"), (True, "reference")):
        loaded = load_model(write(tmp_path, SMALL, packed), ops="reference", progress=False)
        assert (loaded.numerics, loaded.dtype) == (numerics, torch.bfloat16)
    assert load_model(tmp_path, numerics="plain", progress=False).numerics == "plain"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_rounded_where_they_are_made_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    write(tmp_path, SMALL, packed=True)
    tokens = text_tokens(random_text(20))
    loaded = load_model(tmp_path, dtype=dtype, numerics="reference", ops="reference", progress=False)
    expected = prefill(loaded.model, tokens)
    monkeypatch.setattr(loaded.model.options.build.ops, "rounds_ahead", True)
    assert loaded.model.text.layers[1].attn.quant is not None
    assert torch.equal(prefill(loaded.model, tokens), expected)


@pytest.mark.parametrize("packed", [True, False])
def test_maps_of_one_input_multiplied_together_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    write(tmp_path, SMALL, packed=packed)
    tokens = text_tokens(random_text(20))
    loaded = load_model(tmp_path, dtype="float32", ops="reference", progress=False)
    expected = prefill(loaded.model, tokens)
    ops = loaded.model.options.build.ops
    calls: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return linear_merged(*args, **options)

    monkeypatch.setattr(ops, "merges", True)
    monkeypatch.setattr(ops, "linear_merged", counted)
    for _ in range(2):
        assert_law(prefill(loaded.model, tokens), expected)
    if packed:  # these small matrices do not end with blocks of scales, and are multiplied one by one
        return
    assert len(calls) == 2 * 2 * len(loaded.config.text.layers), "inputs of attention, and of the shared expert"
    layer = loaded.model.text.layers[1]
    weights = [linear.weight for linear in (layer.attn.wkv, layer.attn.wq_a)]
    assert len({weight.data.untyped_storage().data_ptr() for weight in weights}) == 1, "they lie in one stack"


def test_packed_weights_without_rounding_are_the_decoded_weights(tmp_path: Path) -> None:
    write(tmp_path, SMALL, packed=True)
    tokens = text_tokens(random_text(20))
    packed, expanded = (
        load_model(tmp_path, dtype="float32", numerics="plain", ops="reference", expand=expand, progress=False)
        for expand in (False, True)
    )
    torch.testing.assert_close(prefill(packed.model, tokens), prefill(expanded.model, tokens))


def test_a_vision_checkpoint_stripped_of_bias_vl_is_refused_by_name(tmp_path: Path) -> None:
    """Text alone still loads: its rows never use the bias."""
    write(tmp_path, SMALL, leave_out="bias_vl")
    with pytest.raises(CheckpointError, match=r"layers\.0\.ffn\.gate\.bias_vl"):
        load_model(tmp_path, progress=False)
    loaded = load_model(tmp_path, images=False, progress=False)
    assert loaded.model.vision is None


def test_one_missing_tower_tensor_is_named(tmp_path: Path) -> None:
    write(tmp_path, SMALL, leave_out="vision.blocks.0.attn.wo.bias")
    with pytest.raises(CheckpointError, match=r"vision\.blocks\.0\.attn\.wo\.bias"):
        load_model(tmp_path, progress=False)


def test_a_hash_layer_needs_no_bias_and_a_scored_layer_does(tmp_path: Path) -> None:
    write(tmp_path, TEXT_ONLY, leave_out="layers.0.ffn.gate.bias")
    load_model(tmp_path, progress=False)
    write(tmp_path, TEXT_ONLY, leave_out="layers.1.ffn.gate.bias")
    with pytest.raises(CheckpointError, match=r"layers\.1\.ffn\.gate\.bias"):
        load_model(tmp_path, progress=False)


def test_the_hash_layers_bias_changes_nothing() -> None:
    config = small_config()
    weights = random_weights(empty_model(config).slots())
    name = "layers.0.ffn.gate.bias"
    moved = weights | {name: Packed(weights[name].format, weights[name].data + 5, None, weights[name].shape)}
    tokens = text_tokens(random_text(20))
    before, after = (prefill(build_model(config, w), tokens) for w in (weights, moved))
    assert torch.equal(before, after)


@pytest.mark.parametrize("odd", ["layers.1.ffn.experts.0.w1", "layers.1.ffn.experts.2.w2"])
def test_experts_of_two_formats_are_refused_on_loading(odd: str, tmp_path: Path) -> None:
    write(tmp_path, TEXT_ONLY, packed=True)
    tensors = load_file(tmp_path / "model.safetensors")
    shape = {slot.name: slot.shape for slot in empty_model(small_config(vision_n_layers=0)).slots()}[odd]
    tensors[f"{odd}.weight"] = encode(torch.randn(shape), BF16).data
    del tensors[f"{odd}.scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="differ in format"):
        load_model(tmp_path, progress=False)


def test_unknown_choices_are_refused(tmp_path: Path) -> None:
    write(tmp_path, TEXT_ONLY)
    for options in (
        {"dtype": "float16"},
        {"numerics": "exact"},
        {"ops": "fastest"},
        {"device": "tpu"},
        {"device": "meta"},
    ):
        with pytest.raises(DeviceError, match=next(iter(options.values()))):
            load_model(tmp_path, progress=False, **options)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="torch sees 0 CUDA devices"):
            find_device("cuda")
    with pytest.raises(DeviceError, match="cuda:99"):
        find_device("cuda:99")
    with pytest.raises(ConfigError):
        load_model(tmp_path / "nowhere")


def test_logits_are_summed_in_fp32_also_for_bf16_activations() -> None:
    bf16 = small_model(dtype=torch.bfloat16, expand=False)
    hidden = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 48))).bfloat16()
    weight = bf16.head.weight
    assert weight is not None
    logits = bf16.logits(hidden, torch.tensor([2, 0]))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), hidden[[2, 0]].double() @ weight.data.double().mT, rtol=1e-5, atol=1e-5)
