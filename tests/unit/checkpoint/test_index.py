"""Index and files must agree; where they do not, both sets are named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from spyglass.checkpoint.safetensors import INDEX_NAME, open_checkpoint
from spyglass.errors import CheckpointError
from tests.unit.checkpoint.small_files import Raw, entries_of, read_raw, write_file, write_raw

TENSORS = {f"t{number}": Raw("U8", (3,), bytes([number] * 3)) for number in range(6)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_raw(tmp_path, TENSORS, files=2)
    return tmp_path


def edit_index(folder: Path, **weight_map: str | None) -> None:
    content = json.loads((folder / INDEX_NAME).read_text())
    content["weight_map"] |= weight_map
    content["weight_map"] = {name: file for name, file in content["weight_map"].items() if file is not None}
    (folder / INDEX_NAME).write_text(json.dumps(content))


def test_all_tensors_of_all_files_are_found(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert read_raw(folder) == TENSORS
    assert checkpoint.nbytes == 18 and len(checkpoint.files) == 2 and checkpoint.ignored_files == ()


def test_an_index_left_over_from_other_files_names_both_sets(folder: Path) -> None:
    for number in (1, 2):
        file = folder / f"model-{number:05d}-of-00002.safetensors"
        file.rename(folder / f"model-{number:05d}-of-00004.safetensors")
    with pytest.raises(CheckpointError, match="the index does not match the files") as caught:
        open_checkpoint(folder)
    for name in ("model-00001-of-00002", "model-00002-of-00002", "model-00001-of-00004", "model-00002-of-00004"):
        assert name in str(caught.value)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"does not match the files: 1 of the 2 that .* missing: model-00002-of-00002\S*; fetch"
    ):
        open_checkpoint(folder)


def test_files_the_index_does_not_name_are_told_not_read(folder: Path) -> None:
    (folder / "adapter.safetensors").write_bytes(b"whatever")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.ignored_files == ("adapter.safetensors",)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"t9": "model-00001-of-00002.safetensors"}, "in no shard: t9"),
        ({"t1": None}, "not listed: t1"),
        (
            {"t1": "model-00001-of-00002.safetensors"},
            r"in another shard: t1 \(listed in model-00001.*found in model-00002",
        ),
        ({"t1": "../model.safetensors"}, "expected a safetensors file of this folder"),
        ({"t1": "model.bin"}, "expected a safetensors file of this folder"),
        ({"t1": 3}, "expected a safetensors file of this folder"),
    ],
)
def test_an_index_that_contradicts_the_headers_is_refused(folder: Path, edit: dict[str, Any], message: str) -> None:
    edit_index(folder, **edit)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map"', "\x00"])
def test_a_damaged_index_is_refused(folder: Path, text: str) -> None:
    (folder / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(folder)


def test_an_index_that_is_no_plain_file_is_neither_waited_for_nor_overlooked(folder: Path) -> None:
    index = folder / INDEX_NAME
    for make in (
        os.mkfifo,
        os.mkdir,
        lambda path: os.symlink("/dev/zero", path),
        lambda path: os.symlink("gone", path),
    ):
        index.unlink()
        make(index)
        with pytest.raises(CheckpointError, match=r"index\.json (is not a file of at most|cannot be read)"):
            open_checkpoint(folder)
        if index.is_dir() and not index.is_symlink():
            index.rmdir()
            index.touch()


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    both = {"t0": TENSORS["t0"], "t1": TENSORS["t1"]}
    for number in (1, 2):
        write_file(folder / f"model-{number:05d}-of-00002.safetensors", entries_of(both), bytes(6))
    with pytest.raises(CheckpointError, match="in more than one shard: t0, t1"):
        open_checkpoint(folder)


def test_every_truncated_shard_is_named_from_its_header_alone(folder: Path) -> None:
    for number in (1, 2):
        file = folder / f"model-{number:05d}-of-00002.safetensors"
        os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert str(caught.value).count("is truncated: the header ends") == 2
    assert "00001-of-00002" in str(caught.value) and "00002-of-00002" in str(caught.value)


@pytest.mark.parametrize("file", ["model.safetensors", "weights.safetensors", "model-00001-of-00001.safetensors"])
def test_a_single_file_needs_no_index(tmp_path: Path, file: str) -> None:
    write_file(tmp_path / file, entries_of(TENSORS), bytes(18))
    assert set(open_checkpoint(tmp_path).tensors) == set(TENSORS)


@pytest.mark.parametrize("files", [[], ["a.safetensors", "b.safetensors"], ["model-00001-of-00002.safetensors"]])
def test_several_files_or_a_part_need_an_index(tmp_path: Path, files: list[str]) -> None:
    for file in files:
        write_file(tmp_path / file, {}, b"")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("absent", "file", "file/below", "x" * 5000, "nul\0"):
        with pytest.raises(CheckpointError, match="is not a folder"):
            open_checkpoint(tmp_path / name)


def test_a_folder_that_may_not_be_listed_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        open_checkpoint(folder)


def test_files_with_holes_are_remarked_on(folder: Path, tmp_path: Path) -> None:
    assert open_checkpoint(folder).sparse_files() == ()
    holes = tmp_path / "holes"
    holes.mkdir()
    write_file(
        holes / "model.safetensors", {"t": {"dtype": "U8", "shape": [9 << 20], "data_offsets": [0, 9 << 20]}}, b""
    )
    os.truncate(holes / "model.safetensors", (holes / "model.safetensors").stat().st_size + (9 << 20))
    assert open_checkpoint(holes).sparse_files() == ("model.safetensors",)


def test_d4_of_many_shards_the_missing_one_is_named(tmp_path: Path) -> None:
    names = [f"model-{number:05d}-of-00048.safetensors" for number in range(1, 49)]
    for number, name in enumerate(names):
        write_file(tmp_path / name, entries_of({f"t{number}": Raw("U8", (1,), b"x")}), b"x")
    weight_map = {f"t{number}": name for number, name in enumerate(names)}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / names[39]).unlink()
    (tmp_path / "other.safetensors").touch()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    text = str(caught.value)
    assert "1 of the 48" in text and names[39] in text and "other.safetensors" in text
    assert sum(name in text for name in names) == 1
