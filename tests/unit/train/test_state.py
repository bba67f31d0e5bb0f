"""Training states on disk: small files, whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

import spyglass.train.state
from spyglass.errors import CheckpointError
from spyglass.train.state import MOST_BYTES, State, load_state, save_state


def state(step: int) -> State:
    tensors = {
        "big": torch.arange(9_000_001, dtype=torch.int32),
        "small": torch.full((2, 3), step, dtype=torch.bfloat16),
        "scalar": torch.tensor(step),
        "none": torch.empty(0, 4),
    }
    return State(step=step, tensors=tensors, facts={"seed": 1})


def test_what_is_saved_comes_back_in_files_of_at_most_16_mb(tmp_path: Path) -> None:
    folder = save_state(tmp_path, state(7))
    assert len(list(folder.glob("*.safetensors"))) >= 3
    assert max(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES
    back = load_state(tmp_path)
    assert back is not None and back.step == 7 and back.facts == {"seed": 1}
    assert back.tensors.keys() == state(7).tensors.keys()
    for name, tensor in state(7).tensors.items():
        assert torch.equal(back.tensors[name], tensor) and back.tensors[name].dtype == tensor.dtype, name


def test_the_newest_state_replaces_the_one_before(tmp_path: Path) -> None:
    save_state(tmp_path, state(9))
    save_state(tmp_path, state(10))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert load_state(tmp_path / "nothing") is None


def test_a_write_that_is_cut_off_leaves_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(tmp_path, state(1))

    def killed(source: object, target: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(spyglass.train.state.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_state(tmp_path, state(2))
    back = load_state(tmp_path)
    assert back is not None and back.step == 1
    monkeypatch.undo()
    save_state(tmp_path, state(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_state_for_which_there_is_no_room_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its parts would keep the disk full; nor do those of a run that was killed stay for ever."""
    save_state(tmp_path, state(1))
    (tmp_path / "step-00000007.partial").mkdir()

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("spyglass.train.state.to_disk", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            save_state(tmp_path, state(2))
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "step-00000007.partial"}
    save_state(tmp_path, state(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("name", ["part-0001.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_damaged_state_is_refused_in_words(tmp_path: Path, name: str, how: str) -> None:
    path = save_state(tmp_path, state(1)) / name
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="is damaged"):
        load_state(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_state(tmp_path / "file", state(1))
