"""Drafts: next tokens that are tried several at a time, and kept as far as they are what would have been drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from spyglass.engine.runner import RunningStep
from spyglass.engine.sequence import TokenSequence


class Drafter(Protocol):
    """Proposes tokens. A sampled token depends on seed and position alone, so a draft is right if it equals that token,
    and an answer is the same whatever is proposed."""

    @property
    def capture(self) -> tuple[int, ...]:
        """Layers whose residual streams `observe` wants."""

    def propose(self, sequences: Sequence[TokenSequence], most: Sequence[int]) -> Sequence[Sequence[int]]:
        """At most `most` next tokens of each sequence."""

    def observe(self, step: RunningStep) -> None:
        """A step has run, and its tokens are in the answers."""
