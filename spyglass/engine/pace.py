"""How much of a prompt a step may take beside answers under way, by what steps took lately.

A step is as long as its longest work: who reads an answer waits for a prompt of somebody else that runs beside it. So
the tokens of prompts, and images that go through the tower, are measured in seconds. What comes out does not depend on
how a prompt was cut; only when it comes does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

_FIRST = 256  # tokens of prompts, before anything was measured
_LEAST = 16  # tokens of prompts that any step may have, so that a slow machine gets on
_UP, _DOWN = 0.5, 0.1  # how far an estimate goes towards a measurement above it, and below it
_MOST_UP = 4.0  # of an estimate: what a measurement above it counts at most


@dataclass(slots=True)
class _Estimate:
    """Seconds of one unit of work, lately; None before the first measurement."""

    seconds: float | None = None

    def follow(self, seconds: float) -> None:
        """Take a measurement. A machine that became slow is believed sooner than one that became fast."""
        if self.seconds is None:
            self.seconds = seconds
            return
        seconds = min(seconds, _MOST_UP * self.seconds + 1e-6)
        self.seconds += (_UP if seconds > self.seconds else _DOWN) * (seconds - self.seconds)


class Pace:
    """Estimates for steps that are to take `target_s` seconds. One thread calls it."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self.forget()

    def forget(self) -> None:
        """What was measured is no measure of what comes: it was a warm-up."""
        self._answers, self._token, self._cell = _Estimate(), _Estimate(), _Estimate()
        self._began: float | None = None
        self._ended = 0.0
        self._tokens = self._cells = 0

    @property
    def cell_tokens(self) -> float:
        """How many tokens of a prompt take as long as one row of an image in the tower."""
        if self._cell.seconds is None or not self._token.seconds:
            return 1.0
        return max(0.01, self._cell.seconds / self._token.seconds)

    def prompt_tokens(self) -> int:
        """Tokens of prompts in a step beside answers under way: what fits into the target behind the answers' own work,
        but always a third of such a step, and some tokens."""
        if self._token.seconds is None:
            return _FIRST
        answers_s = self._answers.seconds or 0.0
        seconds = max(self._target_s - answers_s, answers_s / 2)
        return max(_LEAST, int(min(seconds / max(self._token.seconds, 1e-9), 1 << 30)))

    def ran(self, began: float, tokens: int, cells: int, *, read: bool) -> None:
        """A step with so many tokens of prompts and rows from the tower has ended; it began at `began` of the clock
        `time.perf_counter`. Unless it was `read`, a device may still be at it, and it is measured with the next one."""
        self._began = began if self._began is None else min(began, self._began)
        self._tokens, self._cells = self._tokens + tokens, self._cells + cells
        if not read:
            return
        now, tokens, cells = time.perf_counter(), self._tokens, self._cells
        seconds = now - max(self._began, self._ended)  # a device begins when the step before has ended
        self._began, self._ended, self._tokens, self._cells = None, now, 0, 0
        if not tokens and not cells:
            self._answers.follow(seconds)
            return
        seconds = max(0.0, seconds - (self._answers.seconds or 0.0))
        if not cells:
            self._token.follow(seconds / tokens)
        elif not tokens or self._token.seconds is not None:
            self._cell.follow(max(0.0, seconds - tokens * (self._token.seconds or 0.0)) / cells)
