"""Held-out chats decide which step is kept and when training ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spyglass.cli.main import main
from spyglass.config.shipped import find_model
from spyglass.config.training import TrainConfig
from spyglass.train.data import Batches
from spyglass.train.finetune import finetune
from spyglass.train.held_out import HeldOut
from spyglass.train.log import HELD_OUT_NAME, HeldOutRow, read_rows
from spyglass.train.loop import LoopOptions, MicroLoss, Task, train


def run(folder: Path, *, steps: int, patience: int) -> tuple[int, float, HeldOut, list[str]]:
    """Train one number from 0 towards 1 while held-out data wants 0.5; steps done, what is left, and what was told."""
    weight = torch.nn.Parameter(torch.zeros(()))
    told: list[str] = []

    def loss(number: int, aim: float) -> MicroLoss:
        return MicroLoss(loss=2 * (weight - aim).square() + number, targets=2)

    held = HeldOut(
        lambda number: loss(number, 0.5), 2, {"w": weight}, steps=steps, every=1, patience=patience, tell=told.append
    )
    held.begin()
    task = Task(
        leaves={"w": weight},
        optimisers=[torch.optim.SGD([weight], lr=0.05)],
        loss=lambda number: loss(0, 1.0),
        after_step=held.after_step,
        enough=held.enough,
    )
    result = train(task, LoopOptions(steps=steps, schedule="constant", clip=None), folder, progress=False)
    assert result.finished
    held.restore()
    return result.step, float(weight.detach()), held, told


def test_the_best_step_is_kept_and_training_ends_when_it_gets_no_better(tmp_path: Path) -> None:
    step, kept, held, told = run(tmp_path / "a", steps=60, patience=3)
    assert step == held.best_step + 3 < 60
    assert abs(kept - 0.5) < 0.06 and told[held.best_step].endswith(f"after step {held.best_step}, the best so far")
    assert not told[-1].endswith("best so far")


def test_without_patience_every_step_is_done_and_the_best_still_kept(tmp_path: Path) -> None:
    step, kept, held, _ = run(tmp_path / "b", steps=60, patience=0)
    assert step == 60 and abs(kept - 0.5) < 0.06 and held.best_step < 60


def test_exact_match_by_task_is_told_with_the_loss_and_handed_to_the_log_once(tmp_path: Path) -> None:
    counts = iter([{"colour": (1, 3), "shape": (0, 1)}, {"colour": (3, 3), "shape": (1, 1)}])
    weight, told = torch.nn.Parameter(torch.zeros(())), list[str]()
    losses = iter([3.0, 2.0])
    held = HeldOut(
        lambda number: MicroLoss(loss=torch.tensor(next(losses)), targets=1),
        1, {"w": weight}, steps=1, every=1, patience=1, tell=told.append, exact=lambda: next(counts),
    )  # fmt: skip
    held.begin()
    held.after_step(0)
    assert told == [
        "held out: loss 3.0000, exact match 1 of 4 (colour 1 of 3, shape 0 of 1) after step 0",
        "held out: loss 2.0000, exact match 4 of 4 (colour 3 of 3, shape 1 of 1) after step 1, the best so far",
    ]
    assert held.best_match == ", exact match 4 of 4 (colour 3 of 3, shape 1 of 1)"
    rows = [(row.step, row.loss, row.task, row.right, row.asked) for row in held.measured()]
    assert rows == [
        (0, 3.0, "", 1, 4), (0, 3.0, "colour", 1, 3), (0, 3.0, "shape", 0, 1),
        (1, 2.0, "", 4, 4), (1, 2.0, "colour", 3, 3), (1, 2.0, "shape", 1, 1),
    ]  # fmt: skip
    assert held.measured() == []


def test_a_loss_is_the_mean_over_all_targets() -> None:
    losses = [MicroLoss(loss=torch.tensor(6.0), targets=2), MicroLoss(loss=torch.tensor(2.0), targets=6)]
    held = HeldOut(losses.__getitem__, 2, {}, steps=1, every=1, patience=1, tell=lambda line: None)
    assert held.measure() == 1.0


def test_a_batch_has_at_most_so_many_chats() -> None:
    batches = Batches([1] * 20, most_tokens=100, seed=0, most_chats=8)
    assert [len(batches[number]) for number in range(batches.count(1))] == [8, 8, 4]


@pytest.mark.slow
def test_held_out_answers_are_compared_by_task_as_eval_compares_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The counts are those of `spyglass eval`, of a model that knows some of the answers; 0 answers, none."""
    model, chats = find_model("spyglass-tiny-v4"), []
    chats += [("words", "What can you do?", "I look at pictures and answer."), ("words", "What can you do?", "I sing.")]
    chats += [("space", "What can you do?", "I look at  pictures and answer. "), ("none", "Who are you?", "A boat.")]
    lines = [
        {"task": task, "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for task, asked, said in chats
    ]
    held, reasons = tmp_path / "held.jsonl", tmp_path / "reasons.jsonl"
    held.write_text("\n".join(map(json.dumps, lines)))
    thought = {"role": "assistant", "content": "I sing.", "reasoning_content": "What do I do?"}
    lines.append({"task": "thought", "messages": [{"role": "user", "content": "What can you do?"}, thought]})
    reasons.write_text("\n".join(map(json.dumps, lines)))
    told: list[str] = []
    alike: dict[str, Any] = {"device": "cpu", "dtype": "float32", "numerics": "plain"}
    config = TrainConfig(
        model=model, data=held, output=tmp_path / "out", steps=2, rank=1, targets=("shared",), lr=1e-9, warmup=0,
        eval_data=reasons, eval_every=1, patience=0, **alike,
    )  # fmt: skip
    finetune(config, tell=told.append, progress=False)
    said = "the answers of 4 of them are compared, in at most 32 passes (--eval-answers 16)"
    assert f"held out: 5 chats of {reasons}; {said}" in told
    assert "held out: answers that cannot be compared: 1 with reasoning" in told
    match = ", exact match 2 of 4 (none 0 of 1, space 1 of 1, words 1 of 2)"
    assert sum(line.startswith("held out: loss ") and match in line for line in told) == 3
    assert sum(line.startswith("held out: kept the adapter") and line.endswith(match) for line in told) == 1
    options = [word for name, value in alike.items() for word in (f"--{name}", value)]
    assert main(["eval", str(model), "--data", str(held), "--lora", str(config.output), *options]) == 0
    table = {row.split()[0]: row.split()[1:3] for row in capsys.readouterr().out.splitlines()[1:]}
    assert table == {"words": ["1", "2"], "space": ["1", "1"], "none": ["0", "1"], "overall": ["2", "4"]}
    rows = read_rows(config.output / "training" / HELD_OUT_NAME, HeldOutRow)
    assert {(row.step, row.task, row.right, row.asked) for row in rows} == {
        (step, task, right, asked)
        for step in (0, 1, 2)
        for task, right, asked in (("", 2, 4), ("none", 0, 1), ("space", 1, 1), ("words", 1, 2))
    }
    told.clear()
    finetune(replace(config, output=tmp_path / "off", steps=1, eval_answers=0), tell=told.append, progress=False)
    assert any(line.endswith("no answers are compared (--eval-answers 0)") for line in told)
    assert not any("exact match" in line for line in told)
