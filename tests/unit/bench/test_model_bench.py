"""The model benchmark runs, and its bound counts the bytes that a step must read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spyglass.bench.model import run, step_bytes
from spyglass.checkpoint.random import new_checkpoint
from spyglass.config import read_model_config

pytestmark = pytest.mark.slow  # writes and runs a model


def test_it_measures_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--preset", "tiny", "--weights", "bf16", "--steps", "2", "--prompts", "64", "--no-baseline"]
    monkeypatch.setattr("spyglass.bench.model.measure_bandwidths", lambda: {"GEMV bf16": 1e9, "plain read": 2e9})
    assert run([*arguments, "--folder", "models", "--threads", "1", "--save"]) == 0
    told = capsys.readouterr().out
    assert "decode batch 1" in told and "decode batch 4" in told and "prefill     64" in told
    [saved] = (tmp_path / "benchmarks" / "results").iterdir()
    rows = json.loads(saved.read_text())["results"]
    assert [row["kind"] for row in rows] == ["decode", "decode", "prefill"]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    for row in rows[:2]:
        assert row["bound"] == pytest.approx(row["batch"] * 1e9 / row["step_bytes"])


def test_a_step_reads_all_dense_weights_and_the_chosen_experts(tmp_path: Path) -> None:
    new_checkpoint(tmp_path / "tiny", "tiny", format="bf16", headers_only=True)
    text = read_model_config(tmp_path / "tiny").text
    one, many = step_bytes(tmp_path / "tiny", text, 1), step_bytes(tmp_path / "tiny", text, 10**4)
    expert = 3 * text.hidden_size * text.moe_intermediate_size * 2
    left_out = len(text.layers) * expert * (text.n_routed_experts - text.num_experts_per_tok)
    rows = (step_bytes(tmp_path / "tiny", text, 2 * 10**4) - many) / 10**4  # cache rows of one sequence
    assert (many - 10**4 * rows) - (one - rows) == pytest.approx(left_out, rel=1e-3)
    head = text.vocab_size * text.hidden_size * 2
    assert head < one < head + 40e6
