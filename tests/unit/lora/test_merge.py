"""Merged checkpoints: every stored value is the one it should be, nothing else has moved, and no loss is hidden."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spyglass.checkpoint.match import native_tensors
from spyglass.checkpoint.random import preset_tensors
from spyglass.checkpoint.safetensors import open_checkpoint
from spyglass.cli.main import main
from spyglass.config.read import read_model_config
from spyglass.errors import AdapterError, CheckpointError
from spyglass.lora.low_rank import AdapterFile, LowRank
from spyglass.lora.merge import Loss, dense_delta, merge_adapter
from spyglass.lora.write import write_adapter
from spyglass.model import load_model
from spyglass.params.table import Param
from spyglass.quant.codec import decode, encode
from spyglass.quant.formats import BF16, F32, fp8
from spyglass.quant.packed import TORCH_DTYPES, Packed
from tests.adapter_parts import random_adapter
from tests.drafted import write_drafted
from tests.tolerance import LOSS_OF_FORMAT, OP_FLOAT32, assert_close

GROUPS = ["attention", "compressor", "indexer", "shared", "experts", "engram", "tower", "aligner"]


@pytest.fixture(scope="module", params=["tiny", "tiny-v41"])
def folder(request: pytest.FixtureRequest, checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of(request.param, seed=3, names="hf" if request.param == "tiny" else "native")


def specs_of(folder: Path) -> dict[str, Param]:
    return preset_tensors("tiny" if folder.name == "tiny" else "tiny-v41")


def adapter_for(folder: Path, groups: list[str], size: float = 0.5) -> AdapterFile:
    specs = specs_of(folder)
    shapes = {name: spec.shape for name, spec in specs.items() if spec.kind == "matrix"}
    return random_adapter(shapes, groups, rank=4, size=size, seed=1)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by native name, as bytes of its dtype."""
    checkpoint, out = open_checkpoint(folder), {}
    files = {file: file.read_bytes() for file in checkpoint.files}
    for name, header in native_tensors(checkpoint).items():
        data = files[header.file][header.start : header.start + header.nbytes]
        out[name] = torch.frombuffer(bytearray(data), dtype=TORCH_DTYPES[header.dtype]).view(header.shape)
    return out


def values(found: dict[str, torch.Tensor], name: str, spec: Param) -> tuple[Packed, torch.Tensor]:
    """A matrix of a checkpoint, packed and as fp32."""
    data, scale = found[f"{name}.weight"], found.get(f"{name}.scale")
    format = spec.format if scale is not None else BF16
    packed = Packed(format, data, scale, spec.shape)
    return packed, decode(packed, torch.float32)


@pytest.mark.parametrize("format", ["same", "bf16"])
def test_touched_matrices_hold_their_sum_and_all_others_what_they_held(
    folder: Path, format: str, tmp_path: Path
) -> None:
    adapter = adapter_for(folder, GROUPS)
    report = merge_adapter(folder, adapter, tmp_path / "out", format=format)  # type: ignore[arg-type]
    before, after = stored(folder), stored(tmp_path / "out")
    specs = specs_of(folder)
    for name, spec in specs.items():
        if spec.kind != "matrix":
            entries = [entry for entry in before if entry in (name, f"{name}.weight", f"{name}.scale")]
            assert entries and all(torch.equal(before[entry], after[entry]) for entry in entries), name
            continue
        packed, dense = values(before, name, spec)
        expected = dense if name not in adapter.modules else dense + dense_delta(adapter.modules[name])
        want = encode(expected, packed.format if format == "same" else BF16)
        assert torch.equal(after[f"{name}.weight"], want.data), name
        assert (want.scale is None) == (f"{name}.scale" not in after)
        assert want.scale is None or torch.equal(after[f"{name}.scale"], want.scale)
    assert {g: loss.modules for g, loss in report.groups.items()} == adapter.counts()
    assert report.unchanged_share < 0.5 and all(0 < loss.relative_error < 1 for loss in report.groups.values())
    assert (read_model_config(tmp_path / "out").weights is None) == (format == "bf16")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert load_model(tmp_path / "out", dtype="float32", progress=False).model is not None


def test_a_delta_is_scale_times_b_times_a_group_by_group() -> None:
    """The rows of B of a group meet the A of that group, or the A that all share."""
    a, b = torch.randn(6, 5), torch.randn(8, 3)
    own = dense_delta(LowRank(a_RI=a, b_OR=b, alpha=6.0))
    assert_close(own, 2.0 * torch.cat([b[:4] @ a[:3], b[4:] @ a[3:]]), OP_FLOAT32)
    assert_close(dense_delta(LowRank(a_RI=a[:3], b_OR=b, alpha=6.0)), 2.0 * b @ a[:3], OP_FLOAT32)


def test_a_change_below_the_steps_of_the_format_is_seen() -> None:
    """1.0 in e4m3 has neighbours 0.9375 and 1.125: 0.01 more is rounded away there, not in bf16."""
    before, delta = torch.ones(128, 128), torch.full((128, 128), 0.01)
    loss, plain = Loss(), Loss()
    loss.add(before, delta, decode(encode(before + delta, fp8((128, 128))), torch.float32))
    plain.add(before, delta, decode(encode(before + delta, BF16), torch.float32))
    assert loss.unchanged_share == 1.0 and loss.relative_error == pytest.approx(1.0)
    assert plain.unchanged_share == 0.0 and plain.relative_error == pytest.approx((0.01 - 0.0078125) / 0.01)
    exact = Loss()
    exact.add(before, delta, decode(encode(before + delta, F32), torch.float32))
    assert_close(exact.relative_error, 0.0, LOSS_OF_FORMAT)


def test_a_merge_that_changes_next_to_nothing_is_refused_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    small = adapter_for(folder, ["attention", "shared"], size=1e-3)
    with pytest.raises(AdapterError, match="more than 90% of the values that the adapter touches in attention, shared"):
        merge_adapter(folder, small, tmp_path / "out", format="same")
    large = adapter_for(folder, ["experts"])
    with pytest.raises(
        AdapterError, match="touches in attention, shared would"
    ):  # most of its values move all the same
        merge_adapter(folder, AdapterFile(modules=small.modules | large.modules), tmp_path / "out", format="same")
    assert not list((tmp_path / "out").iterdir())
    report = merge_adapter(folder, small, tmp_path / "out", format="same", force=True)
    assert report.unchanged_share > 0.9
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        merge_adapter(folder, small, tmp_path / "out")


def test_draft_stages_are_merged_past_as_they_are(tmp_path: Path) -> None:
    write_drafted(tmp_path / "base")
    merge_adapter(tmp_path / "base", adapter_for(tmp_path / "tiny", ["attention"]), tmp_path / "out", format="same")
    before, after = stored(tmp_path / "base"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    drafts = [name for name in before if name.startswith("mtp.0.")]
    assert len(drafts) > 20
    for name in drafts:
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name


@pytest.mark.parametrize("format", ["bf16", "same"])
def test_an_adapter_whose_change_is_no_finite_number_is_never_merged(format: Any, folder: Path, tmp_path: Path) -> None:
    """Both of its halves are finite, so it was read; their product is not."""
    modules = {
        name: replace(pair, a_RI=torch.full_like(pair.a_RI, 1e30), b_OR=torch.full_like(pair.b_OR, 1e30))
        for name, pair in adapter_for(folder, ["attention"]).modules.items()
    }
    with pytest.raises(AdapterError, match=r"what the adapter adds to layers\.0\.attn\.\w+ is too large for fp32"):
        merge_adapter(folder, AdapterFile(modules=modules), tmp_path / "out", format=format)
    assert not list((tmp_path / "out").glob("*"))


def test_an_adapter_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    adapter = adapter_for(folder, ["attention"])
    name = next(iter(adapter.modules))
    pair = adapter.modules[name]
    other = {"layers.99.attn.wq_a": pair, name: pair}
    with pytest.raises(AdapterError, match=r"1 of 2 modules of the adapter matched.* no layers\.99\.attn\.wq_a"):
        merge_adapter(folder, AdapterFile(modules=other), tmp_path / "out")
    wrong = LowRank(a_RI=pair.a_RI[:, 1:], b_OR=pair.b_OR, alpha=1.0)
    with pytest.raises(AdapterError, match="made for another model"):
        merge_adapter(folder, AdapterFile(modules={name: wrong}), tmp_path / "out")
    with pytest.raises(AdapterError, match="experts, the adapter 3"):
        stacked = AdapterFile(modules=adapter.modules, stacked={"layers.0.ffn.experts": 3})
        merge_adapter(folder, stacked, tmp_path / "out")


def test_each_printed_line_says_something_new(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A share stands once: by group, and over all only where there is more than one."""
    for groups, format, kept in (
        (["attention"], "bf16", "matrices in bfloat16"),
        (["attention", "shared"], "same", "had"),
    ):
        lora, out = tmp_path / f"lora-{format}", tmp_path / format
        write_adapter(lora, adapter_for(folder, groups))
        command = ["merge", str(folder), "--lora", str(lora), "--output", str(out), "--format", format]
        assert main(command) == 0
        *told, vision, last = capsys.readouterr().out.splitlines()
        heads = [*groups, "in all"] if len(groups) > 1 else groups
        assert [line.partition(":")[0] for line in told] == heads and vision == "vision: 0 modules"
        assert all(line.count("of values unchanged") == 1 for line in told) and "unchanged" not in last
        assert last.startswith(f"{out} written: ") and last.endswith(kept)


def test_the_command_names_what_was_merged_pictures_included(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An adapter on one module of the aligner: the merged model gives the picture rows that the live one gives."""
    adapter = adapter_for(folder, ["aligner"])
    only = AdapterFile(modules={"aligner.w1": adapter.modules["aligner.w1"]})
    write_adapter(tmp_path / "lora", only, base_model="Other")
    out = tmp_path / "out"
    assert main(["merge", str(folder), "--lora", str(tmp_path / "lora"), "--output", str(out)]) == 0
    told, warned = capsys.readouterr()
    assert "the adapter lora was made for 'Other'" in warned
    assert "aligner: 1 module merged" in told and "vision: 1 module\n" in told
    assert json.loads((out / "config.json").read_text()).get("quantization_config") is None
    assert main(["merge", str(folder), "--lora", str(tmp_path), "--output", str(out)]) == 2
