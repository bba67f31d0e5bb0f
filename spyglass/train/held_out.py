"""Chats kept apart from training: their loss and exact match, the best step kept, an end when it gets no better."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from spyglass.train.log import HeldOutRow
from spyglass.train.loop import MicroLoss


class HeldOut:
    """Measures the loss of micro-batches `loss(0)` to `loss(count - 1)` every `every` steps and after the last.

    `leaves` are what is trained: those of the step with the lowest loss are put back by `restore`. `enough()` says that
    the last `patience` measurements were no better than one before them. `exact`: right answers and all answers, by
    task. `measured()` hands out the rows of measurements that it has not handed out yet.
    """

    def __init__(
        self,
        loss: Callable[[int], MicroLoss],
        count: int,
        leaves: Mapping[str, torch.Tensor],
        *,
        steps: int,
        every: int,
        patience: int,
        tell: Callable[[str], None],
        exact: Callable[[], Mapping[str, tuple[int, int]]] | None = None,
    ) -> None:
        self._loss, self._count, self._leaves, self._tell = loss, count, leaves, tell
        self._steps, self._every, self._patience, self._exact = steps, every, patience, exact
        self.best_step, self.best, self.best_match, self._misses = 0, math.inf, "", 0
        self._rows: list[HeldOutRow] = []
        self._kept: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def measure(self) -> float:
        parts = [self._loss(number) for number in range(self._count)]
        targets = sum(float(part.targets) for part in parts)
        return sum(float(part.loss) for part in parts) / max(targets, 1.0)

    def begin(self) -> None:
        """Measure what is there before the first step; a run that makes it worse ends where it began."""
        self._take(0)

    def after_step(self, step: int) -> None:
        """Step number `step`, from 0, is done."""
        if (step + 1) % self._every == 0 or step + 1 == self._steps:
            self._take(step + 1)

    def _take(self, step: int) -> None:
        loss = self.measure()
        match = {} if self._exact is None else self._exact()
        counts = {"": _total(match), **match}
        self._rows += [HeldOutRow(step=step, loss=loss, task=task, right=r, asked=n) for task, (r, n) in counts.items()]
        if better := loss < self.best:
            self.best_step, self.best, self.best_match, self._misses = step, loss, _told(match), 0
            self._kept = {name: leaf.detach().clone() for name, leaf in self._leaves.items()}
        else:
            self._misses += 1
        best = ", the best so far" if better and step else ""
        self._tell(f"held out: loss {loss:.4f}{_told(match)} after step {step}{best}")

    def measured(self) -> list[HeldOutRow]:
        rows, self._rows = self._rows, []
        return rows

    def enough(self) -> bool:
        """Whether training has stopped to help."""
        return 0 < self._patience <= self._misses

    @torch.no_grad()
    def restore(self) -> None:
        for name, leaf in self._kept.items():
            self._leaves[name].copy_(leaf)


def _total(match: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    return sum(right for right, _ in match.values()), sum(asked for _, asked in match.values())


def _told(match: Mapping[str, tuple[int, int]]) -> str:
    """Exact match in words, by task where there are several."""
    if not match:
        return ""
    right, asked = _total(match)
    by_task = ", ".join(f"{task} {r} of {n}" for task, (r, n) in match.items()) if len(match) > 1 else ""
    return f", exact match {right} of {asked}" + (f" ({by_task})" if by_task else "")
