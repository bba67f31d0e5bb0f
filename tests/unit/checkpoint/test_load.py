"""Loading: every tensor once, in its own format, from any file and under any of its names; every surprise an error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spyglass.checkpoint import stream
from spyglass.checkpoint.load import load_into
from spyglass.checkpoint.random import random_item
from spyglass.checkpoint.safetensors import open_checkpoint
from spyglass.config.read import read_model_config
from spyglass.errors import CheckpointError
from spyglass.params.hf_names import to_hf
from spyglass.params.table import Param, param_table, stored_tensors
from spyglass.quant.codec import decode, encode
from spyglass.quant.formats import BF16, F32, FP4, Format, fp8
from spyglass.quant.packed import Packed, WeightSlot, empty_packed
from tests.small_models import small_config
from tests.unit.checkpoint.small_files import PACKED, Raw, load_all, read_raw, stored_as, write_raw, write_small

Tensors = dict[str, Raw]
WQ_B = "layers.1.attn.indexer.wq_b"  # the only ratio-4 layers of the small model are 1 and 3


def same(a: Packed, b: Packed) -> bool:
    scales = (a.scale is None and b.scale is None) or (
        a.scale is not None and b.scale is not None and torch.equal(a.scale, b.scale)
    )
    return a.format == b.format and a.shape == b.shape and scales and torch.equal(bits(a.data), bits(b.data))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def as_made(*, packed: bool) -> dict[str, Packed]:
    """Every entry as the random checkpoint of seed 0 makes it."""
    specs = param_table(small_config(**PACKED))
    return {
        name: random_item(name, spec, seed=0, format=stored_as(spec, packed)).make() for name, spec in specs.items()
    }


def rewrite(folder: Path, change: Callable[[Tensors], object], files: int = 1) -> None:
    tensors = read_raw(folder)
    change(tensors)
    write_raw(folder, tensors, files)


def rename(tensors: Tensors, to: Callable[[str], str]) -> None:
    renamed = {to(name): raw for name, raw in tensors.items()}
    tensors.clear()
    tensors.update(renamed)


@pytest.mark.parametrize("packed", [True, False])
def test_every_entry_arrives_bit_for_bit(tmp_path: Path, packed: bool) -> None:
    write_small(tmp_path, packed=packed)
    found, report = load_all(tmp_path)
    made = as_made(packed=packed)
    assert found.keys() == made.keys()
    assert [name for name in made if not same(found[name], made[name])] == []
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.files) > 3
    assert report.nbytes == checkpoint.nbytes
    assert sum(count.used for count in report.counts.values()) == len(checkpoint.tensors)
    assert report.counts["vision"].used > 10 and report.counts["text"].used > 100


@pytest.mark.parametrize("files", [1, 2, 3])
def test_weights_and_scales_may_lie_in_different_files(tmp_path: Path, files: int) -> None:
    write_small(tmp_path)
    before, _ = load_all(tmp_path)
    rewrite(tmp_path, lambda tensors: None, files)
    after, _ = load_all(tmp_path)
    assert all(same(before[name], after[name]) for name in before)


def test_weights_may_come_before_or_after_their_scales(tmp_path: Path) -> None:
    write_small(tmp_path)
    before, _ = load_all(tmp_path)
    for order in (1, -1):
        tensors = dict(sorted(read_raw(tmp_path).items(), key=lambda item: item[0].endswith(".scale"))[::order])
        write_raw(tmp_path, tensors)
        after, _ = load_all(tmp_path)
        assert all(same(before[name], after[name]) for name in before)


@pytest.mark.parametrize("packed", [True, False])
def test_transformers_names_with_stacked_experts_load_the_same(tmp_path: Path, packed: bool) -> None:
    native, hf = tmp_path / "native", tmp_path / "hf"
    write_small(native, packed=packed)
    write_small(hf, packed=packed, names="hf")
    assert "model.layers.2.mlp.experts.gate_up_proj" in open_checkpoint(hf).tensors
    (expected, _), (found, report) = load_all(native), load_all(hf)
    assert all(same(expected[name], found[name]) for name in expected)
    assert report.nbytes == open_checkpoint(hf).nbytes


@pytest.mark.parametrize(
    "spelling",
    [
        to_hf,
        lambda name: f"model.{name}",
        lambda name: to_hf(name).replace("model.layers", "model.language_model.layers"),
    ],
    ids=["transformers", "native with prefix", "wrapped"],
)
def test_other_spellings_load_the_same(tmp_path: Path, spelling: Callable[[str], str]) -> None:
    write_small(tmp_path)
    before, _ = load_all(tmp_path)
    rewrite(tmp_path, lambda tensors: rename(tensors, spelling))
    after, _ = load_all(tmp_path)
    assert all(same(before[name], after[name]) for name in before)


def test_each_byte_is_read_once_and_only_what_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small(tmp_path, draft=True)
    reads: list[tuple[str, int, int]] = []
    names: dict[int, str] = {}
    real_open, real_read = os.open, os.preadv

    def open_and_note(path: Path, flags: int) -> int:
        descriptor = real_open(path, flags)
        names[descriptor] = Path(path).name
        return descriptor

    def read_and_note(descriptor: int, views: list[memoryview], start: int) -> int:
        reads.append((names[descriptor], start, len(views[0])))
        return real_read(descriptor, views, start)

    monkeypatch.setattr(stream.os, "open", open_and_note)
    monkeypatch.setattr(stream.os, "preadv", read_and_note)
    _, report = load_all(tmp_path, skip=("draft", "vision"))
    headers = open_checkpoint(tmp_path).tensors.values()
    places = {(header.file.name, header.start, header.nbytes): header.name for header in headers}
    read = [places[place] for place in reads]
    assert len(read) == len(set(read))
    assert not [name for name in read if name.startswith(("mtp.", "vision.", "aligner.", "image_"))]
    assert len(read) == report.counts["text"].used


def test_draft_stages_are_named_and_skipped(tmp_path: Path) -> None:
    write_small(tmp_path, draft=True)
    _, report = load_all(tmp_path)
    drafts = sorted(name for name in open_checkpoint(tmp_path).tensors if name.startswith("mtp."))
    assert sorted(report.skipped["draft"]) == drafts and len(drafts) > 100
    assert (report.counts["draft"].used, report.counts["draft"].unused) == (0, len(drafts))
    assert "skipped on purpose: mtp." in str(report) and f"{len(drafts)} unused" in str(report)


def test_an_unwanted_tower_is_named_and_skipped(tmp_path: Path) -> None:
    write_small(tmp_path)
    found, report = load_all(tmp_path, skip=("draft", "vision"))
    tower = [name for name in open_checkpoint(tmp_path).tensors if name.startswith(("vision.", "aligner.", "image_"))]
    assert sorted(report.skipped["vision"]) == sorted(tower)
    assert not set(found) & set(tower)


def test_the_tower_s_router_biases_may_stay_unread_with_the_tower(tmp_path: Path) -> None:
    write_small(tmp_path)
    specs = {
        name: spec
        for name, spec in param_table(read_model_config(tmp_path)).items()
        if spec.component == "text" and not name.endswith("bias_vl")
    }
    slots = [WeightSlot(name, spec.shape, spec.kind, lambda found: None, spec.optional) for name, spec in specs.items()]
    report = load_into(slots, tmp_path, skip=("draft", "vision"), progress=False)
    assert [name for name in report.skipped["vision"] if "bias_vl" in name] == [
        f"layers.{layer}.ffn.gate.bias_vl" for layer in range(4)
    ]
    with pytest.raises(CheckpointError, match=r"left over.*bias_vl"):
        load_into(slots, tmp_path, progress=False)


def test_a_hash_layer_without_its_unused_bias_loads_and_says_so(tmp_path: Path) -> None:
    write_small(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("layers.0.ffn.gate.bias"))
    found, report = load_all(tmp_path)
    assert "layers.0.ffn.gate.bias" not in found
    assert report.counts["text"].at_init == 1 and "1 left at init" in str(report)


# What each fault says. A fault changes the tensors of a sound packed checkpoint.
def orphan_scale(tensors: Tensors) -> None:
    tensors["layers.9.attn.wq_a.scale"] = Raw("F8_E8M0", (1, 1), b"\x7f")


def bf16_beside_scale(tensors: Tensors) -> None:
    rows, columns = tensors[f"{WQ_B}.weight"].shape
    tensors[f"{WQ_B}.weight"] = Raw("BF16", (rows, columns), bytes(2 * rows * columns))


def retyped(tensors: Tensors, name: str, dtype: str, width: int) -> None:
    raw = tensors[name]
    elements = 1
    for size in raw.shape:
        elements *= size
    tensors[name] = Raw(dtype, raw.shape, bytes(width * elements))


def reshaped(tensors: Tensors, name: str) -> None:
    raw = tensors[name]
    tensors[name] = Raw(raw.dtype, (*raw.shape[:-2], raw.shape[-1], raw.shape[-2]), raw.data)


FAULTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "a tower tensor is missing": (
        lambda t: t.pop("vision.blocks.0.attn.wo.weight"),
        r"missing \(1 tensors\): vision\.blocks\.0\.attn\.wo\.weight$",
    ),
    "a text tensor is missing": (lambda t: t.pop("norm.weight"), r"missing \(1 tensors\): norm\.weight$"),
    "a picture bias is missing": (
        lambda t: t.pop("layers.3.ffn.gate.bias_vl"),
        r"missing \(1 tensors\): layers\.3\.ffn\.gate\.bias_vl$",
    ),
    "a routed layer's bias is missing": (
        lambda t: t.pop("layers.3.ffn.gate.bias"),
        r"missing .*layers\.3\.ffn\.gate\.bias$",
    ),
    "a scale is missing": (
        lambda t: t.pop(f"{WQ_B}.scale"),
        r"missing \(1 tensors\): layers\.1\.attn\.indexer\.wq_b\.scale$",
    ),
    "a scale has no weight": (orphan_scale, r"left over.*: layers\.9\.attn\.wq_a\.scale \(a scale without"),
    "a plain weight has a scale": (
        bf16_beside_scale,
        r"left over.*: layers\.1\.attn\.indexer\.wq_b\.scale \(a scale without",
    ),
    "an unknown tensor": (lambda t: t.update({"surprise": Raw("U8", (1,), b"x")}), r"left over .*: surprise$"),
    "a turned matrix": (
        lambda t: reshaped(t, "embed.weight"),
        r"misshapen .*embed\.weight is BF16 \[48, 70\], expected \[70, 48\] in BF16 or F32, or F8_E4M3",
    ),
    "a turned scale": (
        lambda t: reshaped(t, "layers.0.attn.wq_b.scale"),
        r"misshapen .*wq_b\.weight is F8_E4M3 \[240, 36\], expected a scale of F8_E8M0 \[2, 1\] or \[8, 2\] beside it",
    ),
    "a float16 matrix": (
        lambda t: retyped(t, "head.weight", "F16", 2),
        r"misshapen .*head\.weight is F16 \[70, 48\], expected \[70, 48\] in BF16 or F32",
    ),
    "a float16 vector": (
        lambda t: retyped(t, "norm.weight", "F16", 2),
        r"misshapen .*norm\.weight is F16 \[48\], expected",
    ),
    "a table of experts in int32": (
        lambda t: retyped(t, "layers.0.ffn.gate.tid2eid", "I32", 4),
        r"misshapen .*tid2eid is I32 \[70, 2\], expected \[70, 2\] in I64$",
    ),
    "packed codes with float32 scales": (
        lambda t: retyped(t, "layers.2.ffn.experts.1.w1.scale", "F32", 4),
        r"misshapen .*experts\.1\.w1\.weight is I8 \[40, 24\], expected a scale of F8_E8M0 \[40, 2\] .*found F32",
    ),
    "packed codes unpacked": (
        lambda t: t.update({"layers.2.ffn.experts.1.w1.weight": Raw("I8", (40, 48), bytes(40 * 48))}),
        r"misshapen .*experts\.1\.w1\.weight is I8 \[40, 48\], expected \[40, 24\] for \[40, 48\] values",
    ),
    "two names for one tensor": (
        lambda t: t.update({"model.norm.weight": t["norm.weight"]}),
        r"two names for one tensor: (model\.)?norm\.weight and (model\.)?norm\.weight",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_before_anything_is_read(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = FAULTS[fault]
    write_small(tmp_path)
    rewrite(tmp_path, change)
    monkeypatch.setattr(stream.os, "preadv", lambda *args: pytest.fail("read in spite of a fault"))
    with pytest.raises(CheckpointError, match=message):
        load_all(tmp_path)


def test_a_text_model_refuses_tower_tensors(tmp_path: Path) -> None:
    write_small(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_n_layers": 0}))
    with pytest.raises(CheckpointError, match=r"left over from a vision model.* \(2\d tensors") as caught:
        load_all(tmp_path)
    assert "and " in str(caught.value) and " more" in str(caught.value), "only the first twenty names are listed"


def test_experts_of_one_layer_must_share_a_format(tmp_path: Path) -> None:
    write_small(tmp_path)
    name = "layers.2.ffn.experts.3.w2"

    def widen(tensors: Tensors) -> None:
        del tensors[f"{name}.scale"]
        tensors[f"{name}.weight"] = Raw("BF16", (48, 40), bytes(2 * 48 * 40))

    rewrite(tmp_path, widen)
    with pytest.raises(
        CheckpointError, match=r"mixed \(1 .*layers\.2\.ffn\.experts\.3\.w2 is bf16, the layer's first is fp4"
    ):
        load_all(tmp_path)


def store(tensors: Tensors, name: str, packed: Packed) -> None:
    """Replace one matrix of a checkpoint by another, in any format."""
    spec = Param(shape=packed.shape, kind="matrix", component="text", format=packed.format)
    tensors.pop(f"{name}.scale", None)
    for (tensor, dtype, shape), data in zip(
        stored_tensors(name, spec, packed.format), (packed.data, packed.scale), strict=False
    ):
        assert data is not None
        tensors[tensor] = Raw(dtype, shape, bits(data).numpy().tobytes())


@pytest.mark.parametrize(
    "format", [BF16, F32, FP4, fp8((32, 32)), fp8((128, 128)), fp8((128, 128), "F32"), fp8((32, 32), "F32")], ids=str
)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "bf16"])
@pytest.mark.parametrize("name", [WQ_B, "embed", "vision.blocks.0.attn.wo"])
def test_each_tensor_s_own_dtype_decides_its_format(tmp_path: Path, name: str, packed: bool, format: Format) -> None:
    """One matrix in another format than the rest of its checkpoint; block sizes are told by the scale's shape."""
    write_small(tmp_path, packed=packed)
    values = decode(load_all(tmp_path)[0][name], torch.float32)
    stored = encode(values, format)
    rewrite(tmp_path, lambda tensors: store(tensors, name, stored))
    found = load_all(tmp_path)[0][name]
    ambiguous = all(size <= 32 for size in values.shape)  # one block either way: the values are the same
    assert found.format == format or (ambiguous and found.format.name == format.name)
    assert torch.equal(decode(found, torch.float32), decode(stored, torch.float32))


def test_scale_bytes_may_be_called_uint8(tmp_path: Path) -> None:
    write_small(tmp_path)
    before, _ = load_all(tmp_path)

    def retype(tensors: Tensors) -> None:
        for name, raw in tensors.items():
            if raw.dtype == "F8_E8M0":
                tensors[name] = Raw("U8", raw.shape, raw.data)

    rewrite(tmp_path, retype)
    after, _ = load_all(tmp_path)
    assert all(same(before[name], after[name]) for name in before)


def test_a_file_that_shrinks_while_it_is_read_is_an_error_not_zeros(tmp_path: Path) -> None:
    write_small(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    slots = [
        WeightSlot(name, spec.shape, spec.kind, lambda found: None, spec.optional)
        for name, spec in param_table(read_model_config(tmp_path)).items()
    ]
    os.truncate(checkpoint.files[2], checkpoint.files[2].stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{checkpoint.files[2].name} ended inside"):
        load_into(slots, checkpoint, progress=False)
    checkpoint.files[2].unlink()
    with pytest.raises(CheckpointError, match=f"{checkpoint.files[2].name} cannot be read"):
        load_into(slots, checkpoint, progress=False)


def test_a_slot_may_offer_the_memory_that_is_read_into(tmp_path: Path) -> None:
    write_small(tmp_path)
    stack: list[Packed] = []
    arrived: list[Packed] = []

    def place(format: Format) -> Packed:
        stack.append(empty_packed(format, (3, 40, 48)))
        return stack[0][1]

    name = "layers.2.ffn.experts.1.w1"
    slots = [
        WeightSlot(
            other,
            spec.shape,
            spec.kind,
            arrived.append if other == name else lambda found: None,
            spec.optional,
            place if other == name else None,
        )
        for other, spec in param_table(read_model_config(tmp_path)).items()
    ]
    load_into(slots, tmp_path, progress=False)
    expected = load_all(tmp_path)[0][name]
    assert arrived[0].data.data_ptr() == stack[0].data[1].data_ptr()
    assert same(stack[0][1], expected) and same(arrived[0], expected)


def test_the_progress_bar_is_for_terminals_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_small(tmp_path)
    slots = [
        WeightSlot(name, spec.shape, spec.kind, lambda found: None, spec.optional)
        for name, spec in param_table(read_model_config(tmp_path)).items()
    ]
    load_into(slots, tmp_path, progress=True)
    assert capfd.readouterr() == ("", "")
