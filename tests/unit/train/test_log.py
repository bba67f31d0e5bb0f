"""What a run tells while it goes: TensorBoard shows what log.csv says, the bar what was learned last and how fast."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from spyglass.errors import ConfigError
from spyglass.train.log import (
    EVENTS_NAME,
    HELD_OUT_NAME,
    HeldOutRow,
    Row,
    TrainLog,
    plot_loss,
    read_log,
    read_rows,
    require_wandb,
)


class Terminal(io.StringIO):
    """Where a progress bar shows itself."""

    def isatty(self) -> bool:
        return True


def row(step: int, loss: float) -> Row:
    """Every number another one, so that none can stand for another."""
    return Row(
        step=step, loss=loss, rate=step / 7, norm=3 + step / 9, targets=step, tokens=100 * step, images=2, seconds=0.5
    )


def write(folder: Path, rows: Sequence[Row], done: int = 0, progress: bool = False) -> None:
    log = TrainLog(folder, done=done, steps=8, progress=progress)
    log.add(rows[:2])
    log.add(rows[2:])
    log.add([])
    log.close()


def test_tensorboard_shows_what_the_csv_says_also_after_a_run_that_was_killed(tmp_path: Path) -> None:
    """Steps after the last saved state come again: TensorBoard forgets them too."""
    write(tmp_path, [row(step, 1 / step) for step in (1, 2, 3, 4)])
    write(tmp_path, [row(step, 5 / step) for step in (3, 4, 5)], done=2)
    rows = read_log(tmp_path)
    assert rows == [row(1, 1.0), row(2, 0.5), row(3, 5 / 3), row(4, 1.25), row(5, 1.0)]
    events = EventAccumulator(str(tmp_path / EVENTS_NAME))
    events.Reload()
    shown = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert shown == {
        "loss": [(row.step, np.float32(row.loss)) for row in rows],
        "rate": [(row.step, np.float32(row.rate)) for row in rows],
        "norm": [(row.step, np.float32(row.norm)) for row in rows],
        "tokens per second": [(row.step, 200 * row.step) for row in rows],
    }


def test_measurements_of_held_out_chats_are_in_a_file_and_tensorboard_and_a_resumed_run_goes_on_with_them(
    tmp_path: Path,
) -> None:
    def held(step: int, task: str = "", right: int = 1, asked: int = 2) -> HeldOutRow:
        return HeldOutRow(step=step, loss=4.0 / (step + 1), task=task, right=right, asked=asked)

    log = TrainLog(tmp_path, done=0, steps=8, progress=False)
    log.add([row(1, 1.0)], [held(0), held(0, "colour", 0, 1)])
    log.add([row(2, 0.5), row(3, 0.4)], [held(2), held(3)])
    log.close()
    log = TrainLog(tmp_path, done=2, steps=8, progress=False)
    log.add([row(3, 0.3)], [held(0), held(3, right=0, asked=0)])
    log.close()
    assert read_rows(tmp_path / HELD_OUT_NAME, HeldOutRow) == [
        held(0), held(0, "colour", 0, 1), held(2), held(3, right=0, asked=0)
    ]  # fmt: skip
    events = EventAccumulator(str(tmp_path / EVENTS_NAME))
    events.Reload()
    shown = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"] if "held" in tag}
    assert shown == {
        "held-out loss": [(0, 4.0), (2, np.float32(4 / 3)), (3, 1.0)],
        "held-out exact match": [(0, 0.5), (2, 0.5)],
        "held-out exact match/colour": [(0, 0.0)],
    }


def test_a_run_begun_again_before_its_first_save_has_its_first_measurement_once(tmp_path: Path) -> None:
    for loss in (4.0, 3.0):
        log = TrainLog(tmp_path, done=0, steps=8, progress=False)
        log.add([row(1, loss)], [HeldOutRow(step=0, loss=loss, task="", right=1, asked=2)])
        log.close()
    assert [(one.step, one.loss) for one in read_rows(tmp_path / HELD_OUT_NAME, HeldOutRow)] == [(0, 3.0)]
    events = EventAccumulator(str(tmp_path / EVENTS_NAME))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("held-out loss")] == [(0, 3.0)]


def test_the_plot_is_of_the_run_from_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[Row]] = []
    monkeypatch.setattr("spyglass.train.log.plot_loss", lambda rows, path: drawn.append(list(rows)))
    write(tmp_path, [row(1, 1.0), row(2, 0.5)])
    write(tmp_path, [row(3, 0.25)], done=2)
    assert drawn == [[row(1, 1.0), row(2, 0.5)], [row(1, 1.0), row(2, 0.5), row(3, 0.25)]]


def test_the_bar_shows_the_last_loss_and_rate_and_the_speed_of_the_steps_since_it_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    write(tmp_path, [row(step, step / 8) for step in (3, 4, 5, 6, 7)], done=2, progress=True)
    last = screen.getvalue().rpartition("\r")[2].rstrip()
    assert last.startswith("training:  88%|") and " 7/8 [" in last
    assert last.endswith("loss 0.8750, rate 1.00e+00, 1,200 tokens/s]"), "1,800 tokens in 1.5 seconds"


@pytest.mark.parametrize(("screen", "progress"), [(Terminal(), False), (io.StringIO(), True)])
def test_no_bar_is_shown_where_none_is_wanted_or_nobody_looks(
    screen: io.StringIO, progress: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", screen)
    write(tmp_path, [row(1, 1.0)], progress=progress)
    assert not screen.getvalue()


def test_a_run_is_sent_to_weights_and_biases_only_when_a_project_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, dict[str, float]]] = []
    begun: list[dict[str, str]] = []
    ended: list[bool] = []
    run = SimpleNamespace(log=lambda values, step: sent.append((step, values)), finish=lambda: ended.append(True))
    module = ModuleType("wandb")
    module.__dict__.update(init=lambda **options: begun.append(options) or run)
    module.__spec__ = SimpleNamespace()  # type: ignore[assignment]  # there is one, which is all that is asked
    monkeypatch.setitem(sys.modules, "wandb", module)
    write(tmp_path / "silent", [row(1, 1.0)])
    assert not begun
    log = TrainLog(tmp_path / "mine" / "training", done=0, steps=2, progress=False, wandb="project")
    log.add([row(1, 1.0), row(2, 0.5)])
    log.close()
    assert begun == [{"project": "project", "dir": str(tmp_path / "mine" / "training"), "name": "mine"}]
    assert [(step, values["loss"]) for step, values in sent] == [(1, 1.0), (2, 0.5)] and ended


def test_a_project_that_could_not_be_reached_for_want_of_the_package_is_told_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("spyglass.train.log.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        require_wandb("project")
    require_wandb(None)


def test_the_running_mean_of_the_plot_begins_at_the_first_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curves: dict[str, list[float]] = {}
    monkeypatch.setattr(
        "matplotlib.axes.Axes.plot", lambda self, x, y, **more: curves.update({str(more.get("label")): list(y)})
    )
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda self: None)
    plot_loss([row(step, 4.0) for step in (1, 2, 3)] + [row(4, 0.0)], tmp_path / "loss.png")
    mean = curves["running mean (0.1)"]
    assert np.allclose(mean[:3], 4.0) and mean[3] == pytest.approx(4 * (1 - 0.1 / (1 - 0.9**4)))
