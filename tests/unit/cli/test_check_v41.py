"""`spyglass check` on V4.1 folders: tables counted apart, faults of the engram's files, `--plan` alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spyglass.checkpoint.random import new_checkpoint
from spyglass.cli.main import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    new_checkpoint(tmp_path / "model", "tiny-v41", headers_only=True)
    return tmp_path / "model"


def test_a_sound_folder_is_described(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(folder)]) == 0
    text = capsys.readouterr().out
    for part in ("family: deepseek_v41", "engram         4", "left in their files (--engram mmap)", "would load: yes"):
        assert part in text, part
    assert "tables in files: fits" in text and "tables in memory: fits" in text
    assert "engram tables on the GPUs:" in text


def test_the_plan_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--plan", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "engram tables on the GPUs:" in text and "would load: yes" in text
    assert "family:" not in text and "ops on" not in text


def test_engram_files_that_would_fail_are_faults(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "engram_token_map.json").write_text("[1, 2]")
    assert main(["check", str(folder)]) == 1
    assert "engram_token_map.json holds a list of 2" in capsys.readouterr().out
    (folder / "engram_token_map.json").unlink()
    (folder / "tokenizer.json").unlink()
    assert main(["check", str(folder)]) == 1
    assert "need tokenizer.json or engram_token_map.json" in capsys.readouterr().out


def test_table_sizes_that_contradict_the_primes_are_faults(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["engram_vocab_size"] = 2000
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["check", str(folder)]) == 1
    assert "engram_num_embeddings" in capsys.readouterr().out


def test_checking_loads_no_torch(folder: Path) -> None:
    check = f"main(['check', {str(folder)!r}])"
    program = f"import sys; from spyglass.cli.main import main; {check}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
