"""`spyglass bench stream`: it measures every token of every stream, over real connections."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spyglass.bench.stream import run

pytestmark = pytest.mark.slow


def test_it_prints_and_keeps_what_both_threads_take_for_a_token(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--streams", "3", "--tokens", "20", "--pause-ms", "5", "--output", str(tmp_path / "found.json")]
    assert run(["--model", str(tiny_folder), *options]) == 0
    assert "3 streams of 20 tokens" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    for name in ("fixed events", "chat completions"):
        assert 0 < found[name]["event loop ms/token"] < 50 and found[name]["tokens/event"] >= 1
