"""`spyglass new-checkpoint`: writes what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from spyglass.checkpoint.safetensors import open_checkpoint
from spyglass.cli.main import main


def test_options_reach_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, options in (
        ("a", []),
        ("b", ["--seed", "1"]),
        ("c", ["--format", "bf16", "--names", "hf"]),
        ("d", ["--preset", "mini", "--headers-only"]),
    ):
        assert main(["new-checkpoint", str(tmp_path / name), *options]) == 0
    said = capsys.readouterr()
    assert "preset tiny, 450 tensors" in said.out and "random weights, seed 1" in said.out
    assert "preset mini" in said.out and "headers (values are holes)" in said.out
    a, b, c, d = (open_checkpoint(tmp_path / name) for name in "abcd")
    assert a.tensors.keys() == b.tensors.keys()
    assert a.files[0].read_bytes() != b.files[0].read_bytes()
    assert c.tensors["model.layers.0.mlp.experts.gate_up_proj"].dtype == "BF16"
    assert d.sparse_files() and not a.sparse_files()


def test_a_second_run_into_the_same_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-checkpoint", str(tmp_path / "a"), "--headers-only"]) == 0
    assert main(["new-checkpoint", str(tmp_path / "a"), "--headers-only"]) == 2
    assert "already holds a checkpoint" in capsys.readouterr().err


def test_a_place_where_no_folder_can_be_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/below", "x" * 5000):
        assert main(["new-checkpoint", str(tmp_path / name)]) == 2
        assert "cannot be written: " in capsys.readouterr().err
