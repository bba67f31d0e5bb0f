"""What a run tells while it goes: a CSV file, TensorBoard events, a progress bar, and a plot of the loss at the end."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from spyglass.errors import CheckpointError, ConfigError
from spyglass.progress import Progress

CSV_NAME, PLOT_NAME, EVENTS_NAME, HELD_OUT_NAME = "log.csv", "loss.png", "events", "held_out.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step. `loss` is nats per target token, `rate` the learning rate of the first group, `norm` that of the
    gradient before clipping; `tokens` counts every row of the step, images included; `seconds` since the last row."""

    step: int
    loss: float
    rate: float
    norm: float
    targets: int
    tokens: int
    images: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutRow:
    """A measurement of held-out chats after a step: their loss, and how many of the answers that were `asked` for were
    right, of one `task` or ("") of all."""

    step: int
    loss: float
    task: str
    right: int
    asked: int


_Kind = TypeVar("_Kind", Row, HeldOutRow)


def require_plots() -> None:
    """Raises ConfigError if what draws and logs is not installed, before any time is spent."""
    missing = [name for name in ("matplotlib", "tensorboard") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"training logs need {' and '.join(missing)}; pip install 'spyglass[train]'")


def require_wandb(project: str | None) -> None:
    """Raises ConfigError if a run is to be logged there and cannot be."""
    if project is not None and find_spec("wandb") is None:
        raise ConfigError("--wandb needs the package of that name: pip install wandb, or leave the option out")


class TrainLog:
    """Writes rows to `folder`; rows after `done` steps of an earlier run are dropped, since they will come again.

    `wandb`: a project of Weights & Biases that gets them too; where and whether they are sent is up to its own settings
    (`WANDB_MODE=offline` keeps them in the folder).

    Raises, from every method:
        CheckpointError: the disk is full or the folder cannot be written.
    """

    def __init__(self, folder: Path, *, done: int, steps: int, progress: bool, wandb: str | None = None) -> None:
        require_plots()
        require_wandb(wandb)
        from torch.utils.tensorboard.writer import SummaryWriter

        self._folder, self._done = folder, done
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._rows = [row for row in read_log(folder) if row.step <= done]
            self._held_out = [row for row in read_rows(folder / HELD_OUT_NAME, HeldOutRow) if done and row.step <= done]
            self._file = (folder / CSV_NAME).open("w", newline="", encoding="utf-8")
            self._csv = csv.writer(self._file)
            self._csv.writerow([item.name for item in fields(Row)])
            self._csv.writerows(map(astuple, self._rows))
            self._file.flush()
            self._board: Any = SummaryWriter(str(folder / EVENTS_NAME), purge_step=done + 1 if done else 0)
        self._run: Any = None
        if wandb is not None:
            import wandb as service

            self._run = service.init(project=wandb, dir=str(folder), name=folder.parent.name)
        self._bar = Progress(total=steps, initial=done, unit="step", desc="training", show=progress)

    def add(self, rows: Sequence[Row], held_out: Sequence[HeldOutRow] = ()) -> None:
        """Rows of steps, and of measurements of held-out chats up to the last of them."""
        if held_out:
            self._add_held_out(held_out)
        with _writing(self._folder):
            for row in rows:
                self._csv.writerow(astuple(row))
                values = {"loss": row.loss, "rate": row.rate, "norm": row.norm}
                values["tokens per second"] = row.tokens / max(row.seconds, 1e-9)
                for name, value in values.items():
                    self._board.add_scalar(name, value, row.step)
                if self._run is not None:
                    self._run.log(values, step=row.step)
            self._file.flush()
        self._rows += rows
        if rows:
            last, seconds = rows[-1], sum(row.seconds for row in rows)
            rate = sum(row.tokens for row in rows) / max(seconds, 1e-9)
            self._bar.set_postfix_str(
                f"loss {last.loss:.4f}, rate {last.rate:.2e}, {rate:,.0f} tokens/s", refresh=False
            )
            self._bar.update(len(rows))

    def _add_held_out(self, rows: Sequence[HeldOutRow]) -> None:
        """Rows of measurements; what a resumed run measures before its first step is not of that step, and left out."""
        rows = [row for row in rows if self._done == 0 or row.step > self._done]
        self._held_out += rows
        for row in rows:
            share = row.right / row.asked if row.asked else None
            values = {} if row.task else {"held-out loss": row.loss}
            values |= {} if share is None else {"held-out exact match" + (f"/{row.task}" if row.task else ""): share}
            with _writing(self._folder):
                for name, value in values.items():
                    self._board.add_scalar(name, value, row.step)
                if self._run is not None:
                    self._run.log(values, step=row.step)
        if rows:
            with _writing(self._folder), (self._folder / HELD_OUT_NAME).open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow([item.name for item in fields(HeldOutRow)])
                writer.writerows(map(astuple, self._held_out))

    def close(self) -> None:
        """Finish the files and draw the plot."""
        self._bar.close()
        with _writing(self._folder):
            self._file.close()
            self._board.close()
            if self._run is not None:
                self._run.finish()
            if self._rows:
                plot_loss(self._rows, self._folder / PLOT_NAME)


class ExpectedTime:
    """Tells how long a run will take when its second and third step have been timed; the first one warms up."""

    def __init__(self, steps: int, tell: Callable[[str], None]) -> None:
        self._steps, self._tell = steps, tell
        self._times: list[float] = []

    def after_step(self, step: int) -> None:
        """Step number `step`, from 0, is done."""
        if len(self._times) == 3:
            return
        self._times.append(time.perf_counter())
        if len(self._times) == 3 and (left := self._steps - step - 1):
            seconds = (self._times[2] - self._times[0]) / 2
            self._tell(f"expected: {left} more steps of {seconds:.2g} s, {duration(left * seconds)} in all")


def duration(seconds: float) -> str:
    """Whole seconds, minutes or hours, as people say how long something takes."""
    if seconds < 100:
        return f"about {max(1, round(seconds))} s"
    return f"about {round(seconds / 60)} min" if seconds < 6000 else f"about {seconds / 3600:.1f} h"


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"the log in {folder} cannot be written: {error}; free the disk and resume") from None


def read_log(folder: Path) -> list[Row]:
    """The rows of an earlier run, up to the first that is no row: what a machine that stopped left of the last ones."""
    return read_rows(folder / CSV_NAME, Row)


def read_rows(path: Path, kind: type[_Kind]) -> list[_Kind]:
    """The rows of a file that this module wrote, likewise; none where there is no file."""
    if not path.exists():
        return []
    rows: list[_Kind] = []
    read = {"int": int, "float": float, "str": str}
    with path.open(newline="", encoding="utf-8", errors="replace") as file, suppress(csv.Error):
        for entry in csv.DictReader(file):
            try:
                rows.append(kind(**{item.name: read[str(item.type)](entry[item.name]) for item in fields(kind)}))
            except (TypeError, ValueError, KeyError):
                break
    return rows


def plot_loss(rows: Sequence[Row], path: Path) -> None:
    """Loss per step and its running mean, with the learning rate below, as a PNG."""
    from matplotlib.figure import Figure

    steps, losses = [row.step for row in rows], [row.loss for row in rows]
    mean, smooth = 0.0, []
    for step, loss in enumerate(losses, 1):
        mean += (loss - mean) * 0.1
        smooth.append(mean / (1 - 0.9**step))  # as Adam does: the mean begins at 0, not at an old loss
    figure = Figure(figsize=(8, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    top.plot(steps, losses, color="tab:blue", alpha=0.35, label="loss")
    top.plot(steps, smooth, color="tab:blue", label="running mean (0.1)")
    top.set_ylabel("nats per target token")
    top.legend()
    bottom.plot(steps, [row.rate for row in rows], color="tab:gray")
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=120)
