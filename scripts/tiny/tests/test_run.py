"""A run that trains a shipped model: it begins, is stopped, and goes on from where it was. The model has its size."""

from __future__ import annotations

import csv
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scripts.tiny import train
from scripts.tiny.bins import Capacity
from scripts.tiny.models import NAMES
from scripts.tiny.train import Options, Run
from scripts.tiny.trainer import Outcome, Tensors, WholeTrainer
from spyglass.train.state import State, load_state

pytestmark = pytest.mark.slow
CAPACITY = Capacity(bins=1, length=256, patches=4096, cells=512, images=8, largest_image=1800, targets=64)
FIRST, SECOND = 3, 2  # steps of each call


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A run takes them over for good."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def stop_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal comes while the last of them is learned."""
    step, calls = WholeTrainer.step, iter(range(1, 100))

    def counted(self: WholeTrainer, tensors: Tensors) -> Outcome:
        if next(calls) == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, tensors)

    monkeypatch.setattr(WholeTrainer, "step", counted)


def saved(folder: Path) -> State:
    state = load_state(folder / "state")
    assert state is not None
    return state


def test_a_run_that_was_stopped_goes_on_and_its_state_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "capacity_of", lambda bins, length: CAPACITY)
    monkeypatch.setattr(train, "LOG_EVERY", 1)
    monkeypatch.setattr(train, "HELD_OUT", {"test": 1, "unseen": 1})
    folder, flat = tmp_path / "run", tmp_path / "flat"
    flat.mkdir()
    with monkeypatch.context() as patch:
        stop_after(FIRST, patch)
        call = ["v4", "--folder", str(folder), "--device", "cpu", "--no-compile", "--workers", "1"]
        train.main([*call, "--copy-to", str(flat)])
    first = saved(folder)
    assert first.step == FIRST and first.facts["elapsed"] > 0 and first.facts["drawn"] >= 1
    files = list((folder / "state").glob("*/*"))
    assert sum(path.stat().st_size for path in files) < 100_000_000
    assert max(path.stat().st_size for path in files) <= 16_000_000
    assert {path.name for path in files} < {path.name for path in flat.iterdir()}
    told = capsys.readouterr().out
    assert f"step {FIRST} test: " in told and f"step {FIRST} unseen: " in told

    options = Options(family="v4", folder=folder, minutes=5, horizon=800, rate=1e-3, start=None, seed=0, workers=1,
                      device="cpu", compiled=False, capacity=CAPACITY)  # fmt: skip
    run = Run(options)
    try:
        assert (run.step_number, run.elapsed) == (first.step, first.facts["elapsed"])
        assert run.feeds["train"].first == first.facts["drawn"]
        assert run.taught_V.nonzero()[:, 0].tolist() == first.facts["taught"] != []
        mine = run.trainer.state_tensors()
        assert set(mine) == set(first.tensors) and all(torch.equal(mine[n], first.tensors[n]) for n in mine)
        with monkeypatch.context() as patch:
            stop_after(SECOND, patch)
            run.learn()
        run.save()
    finally:
        run.end()
    second = saved(folder)
    assert second.step == FIRST + SECOND and second.facts["elapsed"] > first.facts["elapsed"]
    assert second.facts["drawn"] > first.facts["drawn"]
    assert set(second.facts["taught"]) >= set(first.facts["taught"])
    assert any(not torch.equal(second.tensors[name], first.tensors[name]) for name in first.tensors)
    with (folder / "log.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, FIRST + SECOND + 1))
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds) and seconds[FIRST] >= round(first.facts["elapsed"], 2)
    assert [path.name for path in (folder / NAMES["v4"]).glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]
