"""The engine benchmark runs, and its bound counts the multiplications that a step must do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spyglass.bench.engine import run, step_products
from spyglass.checkpoint.random import new_checkpoint
from spyglass.model import load_model

pytestmark = pytest.mark.slow  # writes and runs a model


def test_it_measures_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spyglass.bench.engine.measure_bandwidths", lambda: {"GEMV bf16": 1e9, "plain read": 2e9})
    monkeypatch.setattr("spyglass.bench.engine.measure_products", lambda: 1e9)
    arguments = ["--presets", "tiny", "--requests", "1", "3", "--steps", "3", "--folder", "models", "--threads", "1"]
    assert run([*arguments, "--save"]) == 0
    told = capsys.readouterr().out
    assert "1 at once" in told and "3 at once" in told
    [saved] = (tmp_path / "benchmarks" / "results").iterdir()
    one, three = json.loads(saved.read_text())["results"]
    for row in (one, three):
        assert 0 < row["host_ms"] + row["sampling_ms"] < row["step_ms"] * 1.5
        assert row["share"] == pytest.approx(row["tokens_per_second"] / row["bound"])
    loaded = load_model(Path("models/tiny-packed"), dtype="bfloat16", images=False, progress=False)
    assert one["bound_by"] == "memory"
    assert three["bound"] <= 1e9 / step_products(loaded, 1) * 1.001
    assert step_products(loaded, 3) == 3 * step_products(loaded, 1)


def test_multiplications_are_those_of_the_dense_weights_and_of_the_chosen_experts(tmp_path: Path) -> None:
    new_checkpoint(tmp_path / "tiny", "tiny", format="bf16")
    loaded = load_model(tmp_path / "tiny", dtype="bfloat16", images=False, progress=False)
    text = loaded.config.text
    expert = 3 * text.hidden_size * text.moe_intermediate_size
    chosen = len(text.layers) * text.num_experts_per_tok * expert
    head, shared = text.vocab_size * text.hidden_size, len(text.layers) * expert
    assert head + chosen + shared < step_products(loaded, 1) < 1.5 * (head + chosen + shared)
