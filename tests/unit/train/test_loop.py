"""The training loop: micro-batches, schedules, clipping, and going on as if nothing had happened."""

from __future__ import annotations

import errno
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from spyglass.errors import CheckpointError, ConfigError, SpyglassError
from spyglass.parallel.fsdp import Processes
from spyglass.train.log import CSV_NAME, PLOT_NAME, read_log
from spyglass.train.loop import LoopOptions, LoopResult, MicroLoss, Task, adamw, rate_factor, train
from spyglass.train.state import load_state
from tests.tolerance import CLIPPED, LOSS_LAW, ONE_SUM, assert_close

OPTIONS = LoopOptions(steps=6, accumulate=2, warmup=2, seed=3, save_every=2)


class Toy:
    """A line fitted to points: `counts[n % len]` points in micro-batch n, with dropout on the inputs."""

    def __init__(self, counts: tuple[int, ...] = (3, 5), rate: float = 0.05) -> None:
        self.weight = torch.zeros(4, 2, requires_grad=True)
        self.bias = torch.zeros(2, requires_grad=True)
        self.extra = torch.zeros(3)
        self.counts, self.drop = counts, 0.25
        leaves = {"weight": self.weight, "bias": self.bias}
        group = {"params": list(leaves.values()), "lr": rate, "weight_decay": 0.1}
        self.task = Task(
            leaves=leaves, optimisers=[adamw([group])], loss=self.loss, extra={"e": self.extra}, after_step=self.count
        )

    def loss(self, number: int) -> MicroLoss:
        count = self.counts[number % len(self.counts)]
        x = torch.from_numpy(np.random.default_rng(number).normal(size=(count, 4))).float()
        y = x[:, :2] * 2 - x[:, 2:]
        x = torch.nn.functional.dropout(x, self.drop)
        return MicroLoss(loss=(x @ self.weight + self.bias - y).square().sum(), targets=count, tokens=10 * count)

    def count(self, step: int) -> None:
        self.extra[0] += step


def run(folder: Path, options: LoopOptions = OPTIONS, toy: Toy | None = None, resume: bool = False) -> Toy:
    toy = Toy() if toy is None else toy
    train(toy.task, options, folder, resume=resume, progress=False)
    return toy


def losses(folder: Path) -> list[float]:
    return [row.loss for row in read_log(folder)]


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    toy = Toy(rate=0.1)
    toy.drop = 0.0
    result = train(toy.task, replace(OPTIONS, steps=200, save_every=200, log_every=50), tmp_path, progress=False)
    assert result.finished and result.step == 200 and result.loss < 1e-3 * losses(tmp_path)[0]


@pytest.mark.parametrize("kept", [1, 2, 3, 5])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, kept: int) -> None:
    whole = run(tmp_path / "whole")
    toy, calls = Toy(), 0
    inner = toy.task.loss

    def killed(number: int) -> MicroLoss:
        nonlocal calls
        calls += 1
        if calls > 2 * kept + 1:  # in the middle of a step
            raise RuntimeError("killed")
        return inner(number)

    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path / "cut", toy=_with_loss(toy, killed))
    resumed = run(tmp_path / "cut", resume=True)
    assert torch.equal(whole.weight, resumed.weight) and torch.equal(whole.bias, resumed.bias)
    assert torch.equal(whole.extra, resumed.extra)
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")


def _with_loss(toy: Toy, loss: object) -> Toy:
    toy.task = replace(toy.task, loss=loss)  # type: ignore[arg-type]
    return toy


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step_with_its_state_saved(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    toy = Toy()
    inner = toy.task.loss

    def interrupted(micro: int) -> MicroLoss:
        if micro == 4:
            os.kill(os.getpid(), number)
        return inner(micro)

    result = train(
        _with_loss(toy, interrupted).task, replace(OPTIONS, save_every=100), tmp_path / "cut", progress=False
    )
    assert (result.step, result.finished) == (3, False)
    assert signal.getsignal(number) is before
    whole, resumed = run(tmp_path / "whole"), run(tmp_path / "cut", resume=True)
    assert torch.equal(whole.weight, resumed.weight)


def test_a_time_limit_saves_and_stops(tmp_path: Path) -> None:
    result = train(Toy().task, replace(OPTIONS, minutes=0.0), tmp_path, progress=False)
    assert result == LoopResult(step=1, finished=False, loss=losses(tmp_path)[0])
    assert torch.equal(run(tmp_path, resume=True).weight, run(tmp_path / "whole").weight)


def test_two_micro_batches_are_one_batch_of_their_targets(tmp_path: Path) -> None:
    """10 and 30 targets in two micro-batches, or 40 in one, are the same step."""
    cut, whole = Toy(counts=(10, 30)), Toy(counts=(40,))
    cut.drop = whole.drop = 0.0
    assert [cut.loss(number).targets for number in (0, 1)] == [10, 30]

    def both(number: int) -> MicroLoss:
        parts = [cut_loss(2 * number), cut_loss(2 * number + 1)]
        return MicroLoss(loss=parts[0].loss + parts[1].loss, targets=40)

    cut_loss = Toy.loss.__get__(whole)
    whole.counts = (10, 30)
    one = replace(OPTIONS, steps=3, save_every=3, accumulate=1)
    run(tmp_path / "cut", replace(one, accumulate=2), cut)
    run(tmp_path / "whole", one, _with_loss(whole, both))
    assert_close(losses(tmp_path / "cut"), losses(tmp_path / "whole"), LOSS_LAW)
    norms = [[row.norm for row in read_log(tmp_path / name)] for name in ("cut", "whole")]
    assert_close(norms[0], norms[1], LOSS_LAW)
    assert_close(cut.weight, whole.weight, LOSS_LAW)


def test_the_logged_loss_is_a_mean_over_targets_and_the_norm_that_of_its_gradient(tmp_path: Path) -> None:
    toy = Toy(counts=(10, 30))
    toy.drop = 0.0
    parts = [toy.loss(0), toy.loss(1)]
    loss = (parts[0].loss + parts[1].loss) / 40
    grads = torch.autograd.grad(loss, [toy.weight, toy.bias])
    toy.task = replace(toy.task, optimisers=[torch.optim.SGD([toy.weight, toy.bias], lr=1.0)])
    run(tmp_path, replace(OPTIONS, steps=1, clip=None, warmup=0), toy)
    assert_close(toy.weight, -grads[0], ONE_SUM)
    (row,) = read_log(tmp_path)
    assert row.targets == 40 and row.tokens == 400
    assert_close(row.loss, loss, ONE_SUM)
    assert_close(row.norm, torch.cat([grad.flatten() for grad in grads]).norm(), ONE_SUM)


def test_a_gradient_is_clipped_to_the_norm_asked_for(tmp_path: Path) -> None:
    steps = {}
    for clip in (None, 1e-3):
        toy = Toy()
        toy.task = replace(toy.task, optimisers=[torch.optim.SGD([toy.weight, toy.bias], lr=1.0)])
        run(tmp_path / str(clip), replace(OPTIONS, steps=1, clip=clip, warmup=0), toy)
        steps[clip] = float(torch.cat([toy.weight.detach().flatten(), toy.bias.detach()]).norm())
    assert_close(steps[1e-3], 1e-3, CLIPPED)
    assert steps[None] > 0.1


def test_random_numbers_of_a_micro_batch_depend_on_seed_and_number_only(tmp_path: Path) -> None:
    """Other seeds drop other inputs; how many numbers the micro-batch before drew does not matter."""
    first = losses_of(tmp_path / "a", seed=3)
    assert first == losses_of(tmp_path / "b", seed=3)
    assert first != losses_of(tmp_path / "c", seed=4)


def losses_of(folder: Path, seed: int) -> list[float]:
    torch.rand(int(folder.name, 16))
    run(folder, replace(OPTIONS, steps=2, seed=seed))
    return losses(folder)


def test_schedules_rise_and_fall_as_their_formula_says() -> None:
    options = LoopOptions(steps=12, warmup=2, final=0.1)
    assert [round(rate_factor(step, options), 6) for step in (0, 1, 2)] == [round(1 / 3, 6), round(2 / 3, 6), 1.0]
    assert rate_factor(7, options) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    assert rate_factor(7, replace(options, schedule="linear")) == pytest.approx(1 - 0.9 / 2)
    assert rate_factor(11, replace(options, schedule="constant")) == 1.0
    assert rate_factor(12, options) == pytest.approx(0.1)


def test_every_group_keeps_its_own_rate(tmp_path: Path) -> None:
    toy = Toy()
    groups = [{"params": [toy.weight], "lr": 0.0}, {"params": [toy.bias], "lr": 0.1}]
    toy.task = replace(toy.task, optimisers=[adamw(groups)])
    run(tmp_path, OPTIONS, toy)
    assert not toy.weight.any() and toy.bias.all()


def test_logs_and_plot_are_written_and_rows_that_come_again_are_dropped(tmp_path: Path) -> None:
    run(tmp_path, replace(OPTIONS, minutes=0.0))
    with (tmp_path / CSV_NAME).open("a") as file:
        file.write("2,9.9,0.1,1,1,1,0,0.1\n3,9.")
    run(tmp_path, resume=True)
    assert [row.step for row in read_log(tmp_path)] == [1, 2, 3, 4, 5, 6] and 9.9 not in losses(tmp_path)
    assert (tmp_path / PLOT_NAME).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("tail", [b"2,\xff\xfe", b"\0" * 200_000])
def test_what_a_machine_that_stopped_left_of_a_log_is_no_row(tail: bytes, tmp_path: Path) -> None:
    run(tmp_path, replace(OPTIONS, minutes=0.0))
    with (tmp_path / CSV_NAME).open("ab") as file:
        file.write(tail)
    assert [row.step for row in read_log(tmp_path)] == [1]


def test_a_log_that_cannot_be_written_is_told_and_the_run_goes_on_from_its_last_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes first is told: a state that cannot be written, not the plot that cannot be drawn after it."""

    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("spyglass.train.log.plot_loss", no_space)
        with pytest.raises(CheckpointError, match=r"the log in .* No space left on device; free the disk and resume"):
            run(tmp_path)
        patch.setattr("spyglass.train.loop.save_state", _refuse_to_save)
        with pytest.raises(CheckpointError, match="the state is lost"):
            run(tmp_path / "other")
    done = train(Toy().task, OPTIONS, tmp_path, resume=True, progress=False)
    assert done.finished and (tmp_path / PLOT_NAME).exists()


def _refuse_to_save(*_: object) -> None:
    raise CheckpointError("the state is lost")


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_good_state(tmp_path: Path) -> None:
    toy = Toy()
    inner = toy.task.loss

    def breaks(number: int) -> MicroLoss:
        part = inner(number)
        return replace(part, loss=part.loss * math.nan) if number >= 6 else part

    with pytest.raises(SpyglassError, match=r"step 4: the loss is nan.* begin another, in another folder"):
        run(tmp_path, replace(OPTIONS, log_every=4), _with_loss(toy, breaks))
    assert torch.equal(run(tmp_path, replace(OPTIONS, log_every=4), resume=True).weight, run(tmp_path / "whole").weight)


def test_a_step_that_ends_in_no_numbers_is_never_saved(tmp_path: Path) -> None:
    """Its own loss is still one; the run would otherwise end well, or go on from what is lost."""
    toy = Toy()
    toy.task = replace(toy.task, after_step=lambda step: toy.bias.data.fill_(math.inf) if step == 5 else None)
    with pytest.raises(SpyglassError, match="step 6: what is trained holds numbers that are not finite"):
        run(tmp_path, toy=toy)
    state = load_state(tmp_path)
    assert state is not None and state.step == 4


@pytest.mark.parametrize(
    ("change", "told"),
    [({"seed": 4}, "seed 3, this one has 4"), ({"steps": 7}, "steps 6"), ({"schedule": "linear"}, "schedule cosine")],
)
def test_a_run_is_not_resumed_as_another(tmp_path: Path, change: dict[str, object], told: str) -> None:
    run(tmp_path, replace(OPTIONS, minutes=0.0))
    with pytest.raises(ConfigError, match=told):
        run(tmp_path, replace(OPTIONS, **change), resume=True)  # type: ignore[arg-type]


def test_a_run_is_resumed_with_the_facts_it_was_started_with(tmp_path: Path) -> None:
    first, second = Toy(), Toy()
    first.task = replace(first.task, facts={"rank": 8})
    second.task = replace(second.task, facts={"rank": 4})
    run(tmp_path, replace(OPTIONS, minutes=0.0), first)
    with pytest.raises(ConfigError, match="rank 8, this one has 4"):
        run(tmp_path, toy=second, resume=True)


def test_a_run_that_trains_something_else_is_not_resumed(tmp_path: Path) -> None:
    run(tmp_path, replace(OPTIONS, minutes=0.0))
    toy = Toy()
    toy.task = replace(toy.task, extra={})
    with pytest.raises(ConfigError, match=r"trains something else \(extra\.e\)"):
        run(tmp_path, toy=toy, resume=True)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (LoopOptions(steps=0), "steps is 0"),
        (LoopOptions(steps=1, accumulate=0), "accumulate is 0"),
        (LoopOptions(steps=1, clip=0.0), "clip is 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(tmp_path: Path, options: LoopOptions, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        run(tmp_path, options)


def test_processes_must_share_the_micro_batches_of_a_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use a multiple of 2"):
        train(Toy().task, replace(OPTIONS, accumulate=3), tmp_path, processes=Processes(rank=0, count=2))
