"""The image benchmark measures what it says, on a picture small enough for a test."""

from __future__ import annotations

import json

import pytest

from spyglass.bench import image
from spyglass.bench.machine import describe_machine
from spyglass.prompt import patchify, plan_image
from tests.released import V4_VISION, V41_VISION

VISION = {"v4": V4_VISION, "v41": V41_VISION}


def test_both_pipelines_are_compared_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in VISION:
        times = image.measure("tiny", (90, 70), family, runs=1, seconds=0.01)
        assert times.patches == len(patchify(image.photograph((90, 70)), plan_image(90, 70, VISION[family])))
        assert set(times.our_per_second) == {1, 2}
        assert times.share == times.our_rest_ms / times.plain_rest_ms

    monkeypatch.setattr(image, "normalise", lambda pixels: pixels.astype("uint16"))
    with pytest.raises(AssertionError):
        image.measure("tiny", (90, 70), "v4", runs=1, seconds=0.01)


def test_results_come_with_commit_hardware_and_versions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(image, "_SIZES", {"tiny": (90, 70)})
    assert image.run(["--runs", "1", "--seconds", "0.01", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {"commit", "processor", "cores", "python", "torch", "numpy", "pillow"} <= printed["machine"].keys()
    assert [row["family"] for row in printed["results"]] == ["v4", "v41"]
    assert image.run(["--runs", "1", "--seconds", "0.01"]) == 0
    text = capsys.readouterr().out
    assert describe_machine()["pillow"] in text
    assert "bit-equal: yes" in text
