"""Who runs in the next step, and how many tokens of each: a decision, as data.

Law: whoever waits is admitted, in order, as soon as a table row and memory are free, and counts as served then.
Sequences run in the order in which they were last served; among those served alike, single tokens (answers under way)
come first, then the longer waiting. Each takes as much as the step's budget has left, down to a legal cut. The first in
line has the whole budget, which holds the longest uncuttable piece, so nobody waits for ever.
"""

from __future__ import annotations

from collections import deque

from spyglass.engine.blocks import Blocks
from spyglass.engine.sequence import Chunk, TokenSequence
from spyglass.errors import CapacityError


class Scheduler:
    """Waiting and running sequences. `step_tokens` is the most tokens of one step."""

    def __init__(self, blocks: Blocks, step_tokens: int) -> None:
        self._blocks = blocks
        self._step_tokens = step_tokens
        self._step = 0
        self._waiting: deque[TokenSequence] = deque()
        self._running: list[TokenSequence] = []

    @property
    def num_waiting(self) -> int:
        """Sequences without memory yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold memory."""
        return len(self._running)

    def add(self, sequence: TokenSequence) -> None:
        """Queue a sequence.

        Raises:
            CapacityError: it could never run: too long for the memory, or a piece that exceeds a whole step.
        """
        piece = sequence.longest_piece()
        if piece > self._step_tokens:
            raise CapacityError(
                f"a picture of this prompt takes {piece} tokens in one piece, a step has max_step_tokens "
                f"{self._step_tokens}; raise it to at least {piece}"
            )
        self._blocks.refuse_if_never(sequence.length + sequence.limit)
        self._waiting.append(sequence)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step; empty when there is nothing to do."""
        self._step += 1
        self._admit()
        budget = self._step_tokens
        chunks: list[Chunk] = []
        for sequence in sorted(self._running, key=lambda s: (s.served, s.pending > 1, s.request_id)):
            start = sequence.computed
            stop = sequence.cut_at_most(start + min(budget, sequence.pending))
            if stop > start:
                chunks.append(Chunk(sequence, start, stop))
                sequence.served = self._step
                budget -= stop - start
        return chunks

    def remove(self, sequence: TokenSequence) -> None:
        """Forget a sequence, wherever it is, and free its memory."""
        if sequence.row is None:
            self._waiting.remove(sequence)
            return
        self._running.remove(sequence)
        self._blocks.release(sequence.row)
        sequence.row = None
        sequence.image_rows.clear()

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0]
            sequence.row = self._blocks.admit(sequence.length + sequence.limit)
            if sequence.row is None:
                return
            sequence.served = self._step - 1
            self._running.append(self._waiting.popleft())
