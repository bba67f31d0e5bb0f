"""The cache benchmark runs: its cold prompts are new, its repeated ones are known but for the last token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spyglass.bench.cache import run

pytestmark = pytest.mark.slow  # writes and runs a model


@pytest.mark.parametrize("preset", ["tiny", "tiny-v41"])
def test_it_measures_and_saves(preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "cache.json"
    arguments = ["--presets", preset, "--tokens", "700", "--rounds", "1", "--threads", "1", "--output", str(output)]
    assert run([*arguments, "--folder", str(tmp_path)]) == 0
    assert "goal 10x" in capsys.readouterr().out
    [row] = json.loads(output.read_text())["results"]
    assert 700 <= row["tokens"] <= 703 and row["image_tokens"] > 100  # up to three pads of alignment
    assert row["repeated_cached"] == row["tokens"] - 1
    assert row["tokens"] - 40 <= row["asked_again_cached"] < row["tokens"]
    assert min(row["cold_ms"], row["repeated_ms"], row["asked_again_ms"]) > 0
