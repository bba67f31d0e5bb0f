"""The loading benchmark runs and compares like with like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spyglass.bench import load
from spyglass.checkpoint.safetensors import open_checkpoint
from tests.unit.checkpoint.small_files import write_small


@pytest.mark.slow
def test_all_cases_read_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_small(tmp_path)
    assert load.run([str(tmp_path), "--runs", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bytes"] == sum(file.stat().st_size for file in open_checkpoint(tmp_path).files)
    speeds = {speed["name"]: speed for speed in result["speeds"]}
    assert {"cold cat to nowhere", "cold load", "warm cat into memory", "warm load"} <= set(speeds)
    for speed in speeds.values():
        assert speed["gb_per_second"] == pytest.approx(result["bytes"] / 1e9 / speed["seconds"])
    ratio = speeds["cold cat to nowhere"]["seconds"] / speeds["cold load"]["seconds"]
    assert result["load_over_cat_cold"] == pytest.approx(ratio)
