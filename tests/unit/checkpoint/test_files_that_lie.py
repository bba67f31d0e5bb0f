"""Files whose headers are sound and whose content is not what it seems: parts of two releases, stretches of zeros."""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from spyglass.checkpoint.origin import mixed_revisions
from spyglass.checkpoint.safetensors import open_checkpoint
from spyglass.checkpoint.zeros import zero_stretches
from spyglass.cli.main import main
from spyglass.errors import CheckpointError
from tests.unit.checkpoint.small_files import load_all, read_raw, write_raw, write_small

A, B = "a" * 40, "b" * 40


def state(file: Path, revision: str) -> None:
    """Write a revision into the metadata of a header."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header["__metadata__"] = {"format": "pt", "revision": revision}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def note(file: Path, revision: str) -> None:
    """Write what the hub's client writes beside a download."""
    folder = file.parent / ".cache" / "huggingface" / "download"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{file.name}.metadata").write_text(f"{revision}\n{'0' * 64}\n1730000000.0\n")


def link(file: Path, revision: str) -> None:
    """Make a file a link into the snapshot of a revision, which is a link to a blob."""
    hub = file.parent.parent / "hub"
    blob, snapshot = hub / "blobs" / f"{file.name}-content", hub / "snapshots" / revision / file.name
    for path in (blob, snapshot):
        path.parent.mkdir(parents=True, exist_ok=True)
    file.rename(blob)
    snapshot.symlink_to(os.path.relpath(blob, snapshot.parent))
    file.symlink_to(snapshot)


@pytest.mark.parametrize("mark", [state, note, link])
def test_d3_parts_of_two_revisions_are_told_by_check_and_when_they_are_loaded(
    mark: Callable[[Path, str], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "model"
    write_small(folder)
    files = open_checkpoint(folder).files
    for file in files:
        mark(file, A)
    assert mixed_revisions(open_checkpoint(folder)) == []
    if mark is link:
        files[1].unlink()
        (tmp_path / "hub" / "blobs" / f"{files[1].name}-content").rename(files[1])
    mark(files[1], B)
    (line,) = mixed_revisions(open_checkpoint(folder))
    assert f"{B}: {files[1].name}" in line and files[2].name in line
    main(["check", str(folder)])
    assert line.split(" (")[0] in capsys.readouterr().out
    with caplog.at_level(logging.WARNING):
        load_all(folder)
    assert line in caplog.text


def test_d3_a_config_of_another_revision_is_told_too(tmp_path: Path) -> None:
    write_small(tmp_path)
    for file in open_checkpoint(tmp_path).files:
        note(file, A)
    note(tmp_path / "config.json", B)
    assert "config.json" in mixed_revisions(open_checkpoint(tmp_path))[0]


@pytest.mark.parametrize(("begin", "end"), [(0.5, 1.0), (0.7, 1.0), (0.3, 0.6), (0.0, 0.2)])
@pytest.mark.parametrize("packed", [True, False])
def test_d6_a_file_of_which_a_part_was_never_written_is_refused(
    begin: float, end: float, packed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_small(tmp_path, packed=packed, shard_bytes=10_000_000)
    (file,) = open_checkpoint(tmp_path).files
    assert zero_stretches(open_checkpoint(tmp_path)) == []
    raw = bytearray(file.read_bytes())
    data = 8 + struct.unpack("<Q", raw[:8])[0]
    first, last = (data + int((len(raw) - data) * share) for share in (begin, end))
    raw[first:last] = bytes(last - first)
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"is zeros from about byte [\d,]+ to [\d,]+.*download it again"):
        load_all(tmp_path)
    assert main(["check", str(tmp_path)]) == 1
    assert "is zeros from about byte" in capsys.readouterr().out


def test_d6_a_matrix_of_zeros_is_no_unfinished_download(tmp_path: Path) -> None:
    write_small(tmp_path, shard_bytes=10_000_000)
    tensors = read_raw(tmp_path)
    raw = tensors["layers.1.attn.wq_b.weight"]
    tensors["layers.1.attn.wq_b.weight"] = type(raw)(raw.dtype, raw.shape, bytes(len(raw.data)))
    write_raw(tmp_path, tensors)
    load_all(tmp_path)


def test_d5_a_stripped_tower_is_told_as_one(tmp_path: Path) -> None:
    write_small(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = read_raw(tmp_path)
    text = {name: raw for name, raw in whole.items() if not name.startswith(("vision.", "aligner.", "image_"))}
    for tensors in ({name: raw for name, raw in text.items() if not name.endswith("bias_vl")}, text):
        write_raw(tmp_path, tensors)
        with pytest.raises(
            CheckpointError, match=r"missing is the whole vision tower.*--images 0.*tensors\)"
        ) as caught:
            load_all(tmp_path)
        assert str(caught.value).count("\n") == 1  # one fault
    load_all(tmp_path, skip=("draft", "vision"))
    for tensors in (whole, text):
        write_raw(tmp_path, tensors)
        (tmp_path / "config.json").write_text(json.dumps(config | {"vision_n_layers": 0}))
        with pytest.raises(
            CheckpointError, match=r"left over from a vision model, while config.json describes no tower"
        ):
            load_all(tmp_path)
        load_all(tmp_path, skip=("draft", "vision"))
