"""Writing: bit for bit, sharded, aligned, one entry in memory, all or nothing."""

from __future__ import annotations

import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from spyglass.checkpoint.random import random_item
from spyglass.checkpoint.safetensors import DTYPE_BYTES, INDEX_NAME, open_checkpoint
from spyglass.checkpoint.save import SaveItem, save_checkpoint, save_headers
from spyglass.config.read import read_model_config
from spyglass.errors import CheckpointError
from spyglass.params.table import param_table
from spyglass.quant.packed import Packed
from tests.small_models import small_config
from tests.unit.checkpoint.small_files import PACKED, load_all, write_small


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def items() -> list[SaveItem]:
    specs = param_table(small_config(**PACKED))
    return [random_item(name, spec, seed=0, format=spec.format) for name, spec in specs.items()]


@pytest.mark.parametrize("names", ["native", "hf"])
def test_what_was_loaded_is_saved_to_the_same_bytes(tmp_path: Path, names: str) -> None:
    write_small(tmp_path / "first", names=names)  # type: ignore[arg-type]
    loaded, _ = load_all(tmp_path / "first")
    specs = param_table(read_model_config(tmp_path / "first"))

    def give(name: str) -> Packed:
        return loaded[name]

    again = [SaveItem(name, specs[name], loaded[name].format, lambda name=name: give(name)) for name in loaded]
    save_checkpoint(tmp_path / "second", again, names=names, shard_bytes=30_000)  # type: ignore[arg-type]
    (tmp_path / "first" / "config.json").unlink()
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_another_reader_finds_the_same_bytes(tmp_path: Path) -> None:
    write_small(tmp_path)
    seen = 0
    for file in open_checkpoint(tmp_path).files:
        with safe_open(file, framework="pt") as theirs:
            for name in theirs.keys():
                header = open_checkpoint(tmp_path).tensors[name]
                expected = file.read_bytes()[header.start : header.start + header.nbytes]
                tensor = theirs.get_tensor(name)
                assert tuple(tensor.shape) == header.shape
                assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == expected
                seen += 1
    assert seen == len(open_checkpoint(tmp_path).tensors)


def test_every_tensor_is_aligned_to_its_element(tmp_path: Path) -> None:
    write_small(tmp_path)
    headers = open_checkpoint(tmp_path).tensors.values()
    assert not [header.name for header in headers if header.start % DTYPE_BYTES[header.dtype]]


def test_shards_hold_whole_layers_up_to_their_limit(tmp_path: Path) -> None:
    layout = write_small(tmp_path, shard_bytes=150_000)
    checkpoint = open_checkpoint(tmp_path)
    assert 1 < len(layout.shards) < 5
    assert all(shard.size - len(shard.prefix) <= 150_000 for shard in layout.shards)
    for layer in range(4):
        files = {header.file for name, header in checkpoint.tensors.items() if name.startswith(f"layers.{layer}.")}
        assert len(files) == 1


def test_a_layer_above_the_limit_still_gets_one_file(tmp_path: Path) -> None:
    layout = write_small(tmp_path, shard_bytes=1)
    assert len(layout.shards) == 6  # inputs and tower, four layers, outputs


def test_the_index_tells_the_size_of_all_tensors(tmp_path: Path) -> None:
    write_small(tmp_path)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    checkpoint = open_checkpoint(tmp_path)
    assert index["metadata"]["total_size"] == checkpoint.nbytes
    assert index["weight_map"] == {name: header.file.name for name, header in sorted(checkpoint.tensors.items())}


def test_only_one_entry_is_in_memory_at_a_time(tmp_path: Path) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def watched(item: SaveItem) -> SaveItem:
        def make() -> Packed:
            assert sum(reference() is not None for reference in made) <= 1
            packed = item.make()
            made.append(weakref.ref(packed.data))
            return packed

        return replace(item, make=make)

    save_checkpoint(tmp_path, [watched(item) for item in items()], shard_bytes=30_000)
    assert len(made) == len(items())


def test_headers_alone_are_those_of_the_whole(tmp_path: Path) -> None:
    specs = param_table(small_config(**PACKED))
    whole = save_checkpoint(tmp_path / "whole", items())
    alone = save_headers(tmp_path / "alone", [(name, spec, spec.format) for name, spec in specs.items()])
    assert [shard.prefix for shard in alone.shards] == [shard.prefix for shard in whole.shards]
    described = {
        name: (header.dtype, header.shape, header.start, header.file.name)
        for name, header in open_checkpoint(tmp_path / "alone").tensors.items()
    }
    assert described == {
        name: (header.dtype, header.shape, header.start, header.file.name)
        for name, header in open_checkpoint(tmp_path / "whole").tensors.items()
    }


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [Broken(), OSError(28, "No space left on device")], ids=["a value", "the disk"])
def test_a_failed_save_leaves_the_folder_as_it_was(tmp_path: Path, error: Exception) -> None:
    write_small(tmp_path, shard_bytes=4_000_000_000)
    before = contents(tmp_path)

    def fail() -> Packed:
        raise error

    broken = items()
    broken[-1] = replace(broken[-1], make=fail)
    expected = CheckpointError if isinstance(error, OSError) else Broken
    with pytest.raises(expected, match="No space left" if isinstance(error, OSError) else None):
        save_checkpoint(tmp_path, broken)
    assert contents(tmp_path) == before


def test_a_checkpoint_may_be_replaced_by_one_of_the_same_files(tmp_path: Path) -> None:
    write_small(tmp_path, seed=0)
    write_small(tmp_path, seed=1)
    assert contents(tmp_path) == contents_of_seed(tmp_path / "other", 1)


def contents_of_seed(folder: Path, seed: int) -> dict[str, bytes]:
    write_small(folder, seed=seed)
    found = contents(folder)
    shutil.rmtree(folder)
    return found


def test_two_checkpoints_never_share_a_folder(tmp_path: Path) -> None:
    write_small(tmp_path, shard_bytes=30_000)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="already holds model-00001-of-0000"):
        write_small(tmp_path, shard_bytes=4_000_000_000)
    assert contents(tmp_path) == before


def test_a_disk_that_is_too_small_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"has 0 MB free, the checkpoint needs"):
        save_checkpoint(tmp_path / "new", items())
    assert not list((tmp_path / "new").iterdir())
