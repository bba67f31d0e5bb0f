"""A checkpoint's digest: the same for the same model however it is cut, another for any other model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spyglass.checkpoint.digest import checkpoint_digest
from spyglass.errors import CheckpointError

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "base"
    path.mkdir()
    (path / "config.json").write_text('{"a": 1}')
    (path / "tokenizer.json").write_text("{}")
    save_file({"w": torch.arange(600.0), "b": torch.zeros(3), "s": torch.tensor(2.0)}, path / WEIGHTS)
    return path


def weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)


def test_a_copy_under_another_name_in_one_or_two_files_is_the_same(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    tensors = load_file(copy / WEIGHTS)
    (copy / WEIGHTS).unlink()
    names = {"w": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    names["s"] = names["b"]
    for file in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == file}, copy / file)
    (copy / "model.safetensors.index.json").write_text(str({"weight_map": names}).replace("'", '"'))
    assert checkpoint_digest(copy) == checkpoint_digest(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: (path / "config.json").write_text('{"a": 2}'),
        lambda path: (path / "tokenizer.json").unlink(),
        lambda path: weights(path, lambda tensors: tensors["w"].__setitem__(300, 9.0)),
        lambda path: weights(path, lambda tensors: tensors["b"].__setitem__(2, 9.0)),
        lambda path: weights(path, lambda tensors: tensors["s"].fill_(9.0)),
        lambda path: weights(path, lambda tensors: tensors.update(b=torch.zeros(1, 3))),
        lambda path: weights(path, lambda tensors: tensors.update(b=torch.zeros(3, dtype=torch.int32))),
        lambda path: weights(path, lambda tensors: tensors.update(c=tensors.pop("b"))),
    ],
    ids=["config", "tokenizer", "middle of a long tensor", "short tensor", "scalar", "shape", "dtype", "name"],
)
def test_every_part_of_a_model_counts(change: Callable[[Path], object], folder: Path) -> None:
    before = checkpoint_digest(folder)
    change(folder)
    assert checkpoint_digest(folder) != before


def test_a_large_tensor_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.zeros(1 << 20)}, tmp_path / WEIGHTS)
    read: list[int] = []
    pread = os.pread

    def counted(descriptor: int, size: int, start: int) -> bytes:
        read.append(size)
        out: bytes = pread(descriptor, size, start)
        return out

    monkeypatch.setattr("spyglass.checkpoint.digest.os.pread", counted)
    checkpoint_digest(tmp_path)
    assert sum(read) <= 4096


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        checkpoint_digest(tmp_path / "nowhere")
