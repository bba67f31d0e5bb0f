"""The vision benchmark counts operations as the written analysis does, and compares what it times."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from spyglass.bench import vision
from spyglass.bench.vision import TOWERS, Measured, as_text, jobs, measure, tower_flops
from tests.vision_parts import SMALL


@pytest.mark.parametrize(
    ("family", "grid", "gflop"),
    [("v4", (24, 138), 4205), ("v4", (42, 74), 3863), ("v41", (60, 150), 18173), ("v41", (3, 3063), 18782)],
)
def test_operations_are_those_of_the_analysis(family: str, grid: tuple[int, int], gflop: int) -> None:
    config, hidden = TOWERS[family]
    assert tower_flops(config, hidden, [grid]) / 1e9 == pytest.approx(gflop, rel=3e-3)
    assert tower_flops(config, hidden, [grid] * 2) == 2 * tower_flops(config, hidden, [grid])


def test_every_way_gives_the_same_rows() -> None:
    measured = Measured(SMALL, 32, "cpu", "float32")
    with torch.inference_mode():
        row = measure(measured, "8 mixed", "v4", [(4, 6), (3, 5)], rate=1.0, runs=2)
    assert set(row.milliseconds) == {"plain", "eager", "eager, one by one"}
    assert row.largest_value > 0.1 and max(row.difference.values()) < 1e-4 * row.largest_value
    assert row.patches == 39 and row.bound_ms == tower_flops(SMALL, 32, [(4, 6), (3, 5)]) / 1e9
    text = as_text({"gpu": "none"}, 1.0, [row])
    assert "packed" in text and "goal 1.5x" in text


def test_the_jobs_are_the_ones_asked_for() -> None:
    assert [what for what, _ in jobs("v4")] == ["one picture", "8 mixed", "largest 24x138", "8 of 24x138"]
    assert len(jobs("v41")) == 6
    (_, one), (_, mixed), *_ = jobs("v41")
    assert one == [(28, 28)] and len(mixed) == 8 and len(set(mixed)) > 4


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert vision.run([]) == 1
    assert "CUDA" in capsys.readouterr().out


def test_saved_numbers_carry_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(vision, "matmul_tflops", lambda device: 1.0)
    monkeypatch.setattr(vision, "TOWERS", {"v4": (SMALL, 32)})
    monkeypatch.setattr(vision, "Measured", lambda config, hidden, device: Measured(config, hidden, "cpu", "float32"))
    monkeypatch.setattr(vision, "jobs", lambda family: [("one picture", [(4, 6)])])
    assert vision.run(["--runs", "1", "--save", str(tmp_path / "vision.json")]) == 0
    saved = json.loads((tmp_path / "vision.json").read_text())
    assert saved["machine"]["gpu"] == "a GPU" and saved["results"][0]["what"] == "one picture"
