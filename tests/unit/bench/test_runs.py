"""Every benchmark of this machine runs, says what it is held against, and writes numbers that add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spyglass.bench import cache, engine, image, load, model, reading, stream, train, vision
from spyglass.bench.vision import Measured, measure
from tests.unit.checkpoint.small_files import write_small
from tests.vision_parts import SMALL

pytestmark = pytest.mark.slow  # most write and run a model
BANDWIDTHS = {"GEMV bf16": 1e9, "plain read": 2e9}
ONE_THREAD = ("--threads", "1")


def saved(folder: Path) -> list[dict[str, Any]]:
    [file] = (folder / "benchmarks" / "results").iterdir()
    found: list[dict[str, Any]] = json.loads(file.read_text())["results"]
    return found


def test_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "measure_bandwidths", lambda: BANDWIDTHS)
    monkeypatch.setattr(engine, "measure_products", lambda: 1e9)
    asked = ["--presets", "tiny", "--requests", "1", "3", "--steps", "3", "--folder", "models", "--save", *ONE_THREAD]
    assert engine.run(asked) == 0
    for row in saved(tmp_path):
        assert row["host_ms"] > 0 and row["step_ms"] > 0
        assert row["share"] == pytest.approx(row["tokens_per_second"] / row["bound"])


def test_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model, "measure_bandwidths", lambda: BANDWIDTHS)
    asked = ["--preset", "tiny", "--weights", "bf16", "--steps", "2", "--prompts", "64", "--no-baseline", "--save"]
    assert model.run([*asked, "--folder", "models", *ONE_THREAD]) == 0
    rows = saved(tmp_path)
    assert [row["kind"] for row in rows] == ["decode", "decode", "prefill"]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert all(row["bound"] == pytest.approx(row["batch"] * 1e9 / row["step_bytes"]) for row in rows[:2])


@pytest.mark.parametrize("preset", ["tiny", "tiny-v41"])
def test_cache(preset: str, tmp_path: Path) -> None:
    """Cold prompts are new, repeated ones are known but for the last token."""
    output = tmp_path / "cache.json"
    asked = ["--presets", preset, "--tokens", "700", "--rounds", "1", "--output", str(output), *ONE_THREAD]
    assert cache.run([*asked, "--folder", str(tmp_path)]) == 0
    [row] = json.loads(output.read_text())["results"]
    assert 700 <= row["tokens"] <= 703 and row["image_tokens"] > 100  # up to three pads of alignment
    assert row["repeated_cached"] == row["tokens"] - 1
    assert row["tokens"] - 40 <= row["asked_again_cached"] < row["tokens"]


def test_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_small(tmp_path)
    assert load.run([str(tmp_path), "--runs", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    speeds = {speed["name"]: speed for speed in result["speeds"]}
    assert {"cold cat to nowhere", "cold load", "warm cat into memory", "warm load"} <= set(speeds)
    for speed in speeds.values():
        assert speed["gb_per_second"] == pytest.approx(result["bytes"] / 1e9 / speed["seconds"])


def test_stream(tiny_folder: Path, tmp_path: Path) -> None:
    asked = ["--streams", "3", "--tokens", "20", "--pause-ms", "5", "--output", str(tmp_path / "found.json")]
    assert stream.run(["--model", str(tiny_folder), *asked]) == 0
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    for name in ("fixed events", "chat completions"):
        assert found[name]["event loop ms/token"] > 0 and found[name]["tokens/event"] >= 1


def test_train(tmp_path: Path) -> None:
    profile = tmp_path / "profile.txt"
    numbers = train.measure("tiny", torch.device("cpu"), tokens=1, steps=1, rank=2, rate=0.1, profile=profile)
    told = profile.read_text().splitlines()
    for op in ("experts_grouped", "sparse_attention", "linear_block", "hyper_expand"):
        for name in (f"op {op}", f"backward of op {op}"):
            assert any(line.endswith(f"  {name}") for line in told), name
    assert numbers.images == 1 and numbers.learnt == 64 and numbers.step_seconds > numbers.pack_seconds > 0
    assert len(numbers.loss) == train.WARM_UP + 1 and numbers.loss[1] < numbers.loss[0]
    told = train.as_text({"commit": "x"}, 0.1, numbers)
    assert f"{numbers.tokens / numbers.step_seconds:,.0f} tokens/s" in told


def test_image(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both pipelines give the same bits, and a difference is noticed."""
    for family in ("v4", "v41"):
        times = image.measure("tiny", (90, 70), family, runs=1, seconds=0.01)
        assert times.share == times.our_rest_ms / times.plain_rest_ms
    monkeypatch.setattr(image, "normalise", lambda pixels: pixels.astype("uint16"))
    with pytest.raises(AssertionError):
        image.measure("tiny", (90, 70), "v4", runs=1, seconds=0.01)


def test_vision() -> None:
    """Every way gives the same rows."""
    measured = Measured(SMALL, 32, "cpu", "float32")
    with torch.inference_mode():
        row = measure(measured, "8 mixed", "v4", [(4, 6), (3, 5)], rate=1.0, runs=2)
    assert set(row.milliseconds) == {"plain", "eager", "eager, one by one"}
    assert row.largest_value > 0.1 and max(row.difference.values()) < 1e-4 * row.largest_value
    assert "packed" in vision.as_text({"gpu": "none"}, 1.0, [row])


def test_reading(capsys: pytest.CaptureFixture[str]) -> None:
    assert reading.run(["--runs", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert all(row["here_ms"] > 0 and row["there_ms"] > 0 and row["pause_there_ms"] > 0 for row in rows)
    assert {row["what"].partition(",")[0] for row in rows} == {"image", "text"}
