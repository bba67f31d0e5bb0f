"""Chats that are kept apart from training: their loss, the best step kept, an end when it gets no better."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from spyglass.train.loop import MicroLoss


class HeldOut:
    """Measures the loss of micro-batches `loss(0)` to `loss(count - 1)` every `every` steps and after the last.

    `leaves` are what is trained: those of the step with the lowest loss are put back by `restore`. `enough()` says that
    the last `patience` measurements were no better than one before them.
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
    ) -> None:
        self._loss, self._count, self._leaves, self._tell = loss, count, leaves, tell
        self._steps, self._every, self._patience = steps, every, patience
        self.best_step, self.best, self._misses = 0, math.inf, 0
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
        better = loss < self.best
        if better:
            self.best_step, self.best, self._misses = step, loss, 0
            self._kept = {name: leaf.detach().clone() for name, leaf in self._leaves.items()}
        else:
            self._misses += 1
        self._tell(f"held out: loss {loss:.4f} after step {step}{', the best so far' if better and step else ''}")

    def enough(self) -> bool:
        """Whether training has stopped to help."""
        return 0 < self._patience <= self._misses

    @torch.no_grad()
    def restore(self) -> None:
        for name, leaf in self._kept.items():
            self._leaves[name].copy_(leaf)
