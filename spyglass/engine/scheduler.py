"""Who runs in the next step, and how many tokens of each: a decision, as data.

Admission. The *head*, who waits and came first, is admitted as soon as there are a table row and memory for all that is
known of it, beside the older ones that run, and some tokens more of each. While it lacks memory, any of the next few
that fit beside all that run may pass it. They are guests: the head's turn is counted as if they were not there, and
then the youngest of them are preempted until it fits. So a small text need not wait for the end of a long answer, and
nobody is kept out by who came later, however many they are.

Shares. Half of a step belongs to all prompts under way alike (a *quantum* each), the rest to the longest waiting.
Answers under way take one token each and come before prompts. Nobody is cut inside a span: one whose next piece exceeds
the quantum comes behind the others, unless it would not fit there; then it goes first, but never in two steps running.

Pace. The prompts of a step have so many tokens that it takes about as long as it should (`pace`), images that must go
through the tower counted as the tokens that take as long. Then answers are outside of what is shared, and a piece that
exceeds it goes alone, if it is its turn to go first: beside answers its images go through the tower in one step
(`encode_ahead`), and its tokens run in a later one. Where a step can be left between two layers, answers are not part
of one whose prompts take long: they run in steps of their own meanwhile (`answers`).

Memory. Pages are taken as tokens come, oldest request first. When they run out, the youngest running request is
preempted: it goes back into the queue and is run again later, with all it has drawn.

Clients. Where requests of several clients are here (`shares`), the prompts of the one that has used least of late are
served as if they were alone, and those of the others share what is left of the step. Each client is due its share of
those that run, one at least: when rows or memory are short, the head of one that has fewer takes the place of the
youngest of one that has more, and who must be preempted is that youngest. Between clients that have what they are due,
age decides as it does within one. No request can be displaced by one that it displaced, since its client would have to
have less than it is due. A request that fills the memory alone is not displaced.

Laws, for at most half as many running requests as a step has tokens; the first two for one client, or for the prompts
of the client whose turn it is:
- every answer under way, and every prompt whose next piece is within the quantum (text always is), gets tokens in one
  of any two steps running; so a text prompt waits at most one step for its turn once it is admitted;
- of the others, the one that waited longest gets its piece in one of any two steps, so each gets its turn;
- the oldest that runs is never preempted for memory, since a request alone fits, or it is refused when it comes; and
  of one client the oldest always runs: so it always finishes, and by induction so does everyone. Of several clients
  the turn goes round, since use counts against whoever has it.

Whoever these laws fail, by an internal error, is named in a `StuckError`: the step loop must never spin on nothing.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from spyglass.engine.cache.allocator import CacheAllocator
from spyglass.engine.cache.prefix import PrefixCache
from spyglass.engine.sequence import Chunk, TokenSequence
from spyglass.engine.shares import Client, Pace, RecentUse, due_rows
from spyglass.errors import CapacityError, SpyglassError

GROWTH = 64  # tokens; steps that all can take before memory may be short again
_PASSING = 16  # how many behind the head may be asked whether they fit


class StuckError(SpyglassError):
    """`sequences` would wait for ever: an internal error. Once they are removed, the others go on."""

    def __init__(self, sequences: Sequence[TokenSequence], why: str) -> None:
        super().__init__(f"{why}: a fault of the engine, which ends the request; please report it")
        self.sequences = tuple(sequences)


class Scheduler:
    """Waiting and running sequences, both in the order in which they came. A step has at most `step_tokens` tokens, and
    as many of prompts as `pace` allows, if there is one."""

    def __init__(
        self, allocator: CacheAllocator, step_tokens: int, prefixes: PrefixCache, pace: Pace | None = None
    ) -> None:
        self.allocator, self._prefixes = allocator, prefixes
        self._step_tokens, self.pace = step_tokens, pace
        self._step = 0
        self.waiting: list[TokenSequence] = []
        self.running: list[TokenSequence] = []
        self._changed = False  # somebody came or went; until then the memory for others only shrinks
        self._jumped = False  # a long piece went first in the last step
        self.encode_ahead: list[
            tuple[TokenSequence, int]
        ] = []  # images for the tower in the planned step, beside its own
        self._use = RecentUse()
        self._served = Counter[Client]()  # tokens that are not counted in `_use` yet
        self.preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Sequences without memory yet."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def add(self, sequence: TokenSequence) -> None:
        """Queue a sequence.

        Raises:
            CapacityError: it could never run: too long for the memory, or a piece that exceeds a whole step.
        """
        piece = sequence.longest_piece()
        if piece > self._step_tokens:
            raise CapacityError(
                f"an image of this prompt takes {piece} tokens in one piece, a step has max_step_tokens "
                f"{self._step_tokens}; raise it to at least {piece}"
            )
        self.allocator.refuse_if_never(sequence.length + sequence.answer.limit)
        self.waiting.append(sequence)
        self._changed = True

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, their memory taken; empty when there is nothing to do.

        Raises:
            StuckError: some sequences can never run again; nothing is planned.
        """
        self._step += 1
        self.encode_ahead = []
        self._admit()
        for sequence in self.running:
            if sequence.pending > 1:
                self._prefixes.resume(sequence)
        ready = [sequence for sequence in self.running if not sequence.waits_for_steps]
        if done := [sequence for sequence in ready if sequence.pending < 1]:
            raise StuckError(done, "nothing of this request is left to run, and it has not ended")
        chunks: list[Chunk] = []
        while not chunks and (shares := self._share(ready)):
            chunks = self._with_memory(shares)
            ready = [sequence for sequence in ready if sequence.row is not None]
        if not chunks and (ready or (self.waiting and not self.running)):
            raise StuckError(ready or [self.waiting[0]], "no step can be made for this request")
        prompts = [chunk for chunk in chunks if chunk.is_prompt]
        if self.pace is not None and 0 < len(prompts) < len(chunks):
            cell = self.pace.cell_tokens
            if self.pace.leaves_answers_out(sum(c.sequence.work(c.start, c.stop, cell) for c in prompts)):
                chunks = prompts
        self._serve(chunks)
        self._use.count(self._served)  # with what was served between the layers of the step before
        self._served = Counter()
        return chunks

    def answers(self, running: Collection[int]) -> list[Chunk]:
        """The chunks of a step for the answers under way, while one with these `running` requests has not ended; their
        memory taken. Nobody gives way for them: those for whom there is no memory wait."""
        ready = [s for s in self.running if s.request_id not in running and s.pending == 1 and not s.waits_for_steps]
        chunks = [Chunk.of(sequence, sequence.length) for sequence in ready[: self._step_tokens]]
        if chunks and not self._reserve(chunks):
            chunks = [chunk for chunk in chunks if self._has_memory(chunk)]
        self._serve(chunks)
        return chunks

    def _serve(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            chunk.sequence.served = self._step
            self._served[chunk.sequence.client] += chunk.stop - chunk.start

    def remove(self, sequence: TokenSequence) -> None:
        """Forget a sequence, wherever it is, and free its memory."""
        self._changed = True
        if sequence.row is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.allocator.release(sequence.row)
        sequence.row = None
        sequence.image_rows.clear()

    def _admit(self) -> None:
        if not self._changed:
            return
        self._changed = False
        while any(self._admit_head(head) for head in self._heads()):
            pass
        heads = self._heads()
        for sequence in [s for s in self.waiting if s not in heads][:_PASSING]:
            if self._fits(sequence, self.running):
                self._start(sequence)

    def _heads(self) -> list[TokenSequence]:
        """The first of each client's queue; whose client has least, of rows and then of recent use, comes first."""
        heads: dict[Client, TokenSequence] = {}
        for sequence in self.waiting:
            heads.setdefault(sequence.client, sequence)
        if len(heads) == 1:
            return list(heads.values())
        rows = Counter(sequence.client for sequence in self.running)
        return [heads[c] for c in sorted(heads, key=lambda c: (rows[c] / c.share, self._use.of(c), _age(heads[c])))]

    def _admit_head(self, head: TokenSequence) -> bool:
        """Admit the first of a queue, if it fits once all have given way that must; whether it did."""
        guests = self._guests(head)
        if not self._fits(head, [s for s in self.running if s not in guests]):
            return False
        for guest in guests:
            if self._fits(head, self.running):
                break
            self.preempt(guest)
        self._start(head)
        return True

    def _guests(self, head: TokenSequence) -> list[TokenSequence]:
        """Who of those that run gives way to the first of a queue, in this order."""
        younger = [s for s in reversed(self.running) if s.request_id > head.request_id]
        over = self._over_due(head.client)
        if over is None:
            return [s for s in younger if s.client == head.client]
        return over + [s for s in younger if s not in over]

    def _over_due(self, client: Client | None = None) -> list[TokenSequence] | None:
        """Who runs beyond the rows that its client is due, youngest first; None if `client` has what it is due."""
        rows = Counter(s.client for s in self.running)
        due = due_rows([s.client for s in (*self.running, *self.waiting)], len(self.running))
        if client is not None and rows[client] >= due[client]:
            return None
        over = []
        for sequence in reversed(self.running):
            if rows[sequence.client] > due[sequence.client]:
                rows[sequence.client] -= 1
                over.append(sequence)
        return over

    def _fits(self, sequence: TokenSequence, others: Sequence[TokenSequence]) -> bool:
        """Whether there are a row and memory for it if of all that run only `others` did."""
        lengths = [s.length + GROWTH for s in (*others, sequence)]
        rows = self.allocator.num_free_rows + len(self.running) - len(others)
        return rows > 0 and (not others or self.allocator.has_room(lengths))

    def _start(self, sequence: TokenSequence) -> None:
        self.waiting.remove(sequence)
        sequence.row = self.allocator.admit()
        sequence.served = self._step - 1
        insort(self.running, sequence, key=_age)

    def _share(self, ready: Sequence[TokenSequence]) -> list[Chunk]:
        """Who gets how many tokens, as if memory were no matter; oldest first."""
        if len(ready) <= self._step_tokens and all(s.pending == 1 for s in ready):
            self._jumped = False
            return [Chunk.of(s, s.length) for s in ready]
        left, cell = self._paced(ready) or (self._step_tokens, 0.0)
        alone = [s for s in ready if cell and s.pending == 1]  # answers, which take nothing from prompts then
        stops = {s.request_id: s.length for s in alone}
        shared = [s for s in ready if s.request_id not in stops]
        turns = sorted({s.client for s in shared if s.pending > 1}, key=lambda c: (self._use.of(c), c.name))
        for turn, client in enumerate(turns or [None]):
            theirs = [s for s in shared if (s.client == client if s.pending > 1 else turn == 0)]
            left = self._share_among(theirs, left, cell, stops, is_first=turn == 0)
        return [Chunk.of(s, stop) for s in ready if (stop := stops[s.request_id]) > s.computed]

    def _paced(self, ready: Sequence[TokenSequence]) -> tuple[float, float] | None:
        """The tokens of prompts in this step, and those that a row of the tower counts as; None where prompts may take
        the whole step, or one of them must."""
        prompts = [s for s in ready if s.pending > 1]
        room = self._step_tokens - (len(ready) - len(prompts))
        if self.pace is None or not prompts or max(s.next_piece() for s in prompts) > room:
            return None
        tokens = self.pace.prompt_tokens(alone=len(ready) == 1 and not self.waiting)
        return min(room, max(2 * len(prompts), tokens)), self.pace.cell_tokens

    def _share_among(
        self, ready: Sequence[TokenSequence], left: float, cell: float, stops: dict[int, int], *, is_first: bool
    ) -> float:
        """Give `left` tokens to these, noting where each stops; how many are left then."""
        prompts = sum(s.pending > 1 for s in ready)
        quantum = max(1.0, left // (2 * max(1, prompts)))
        line = self._line(ready, quantum, left, cell, is_first=is_first)
        for sequence in line:
            start, piece = sequence.computed, _piece(sequence, cell)
            goes_first = is_first and self._jumped and sequence is line[0]
            stop = sequence.reach(start, min(max(quantum, piece), left), cell)
            if goes_first and stop == start:  # alone more than a paced step, which it then has for itself
                stop, left = start + sequence.next_piece(), 0.0
                answers = stops.keys() - {s.request_id for s in ready}  # so that the step has something without it
                if answers and self.pace is not None and self.pace.slice_s is None:
                    self.encode_ahead = [(sequence, image) for image in sequence.new_images(start, stop)]
                    stop = start if self.encode_ahead else stop
            stops[sequence.request_id] = stop
            left = max(0.0, left - sequence.work(start, stop, cell))
        for sequence in ready:
            before = stops[sequence.request_id]
            stop = sequence.reach(before, left, cell) if left else before
            left -= sequence.work(before, stop, cell)
            stops[sequence.request_id] = stop
        return left

    def _line(
        self, ready: Sequence[TokenSequence], quantum: float, left: float, cell: float, *, is_first: bool
    ) -> list[TokenSequence]:
        """The order in which they take their quantum or their next piece."""
        easy: list[TokenSequence] = []
        hard: list[TokenSequence] = []
        for sequence in sorted(ready, key=lambda s: (s.served, s.pending > 1, s.request_id)):
            (easy if _piece(sequence, cell) <= quantum else hard).append(sequence)
        taken = sum(min(quantum, sequence.pending) for sequence in easy)
        if not is_first:
            return easy + hard
        crowded = bool(hard) and taken + _piece(hard[0], cell) > left
        self._jumped = crowded and (not self._jumped or not easy)
        return [hard[0], *easy, *hard[1:]] if self._jumped else easy + hard

    def _with_memory(self, chunks: list[Chunk]) -> list[Chunk]:
        """Take the pages of the chunks, oldest first; what is left of the chunks after preemptions.

        Who gives way is the youngest of a client that has more rows than it is due, else the youngest of all.
        """
        if self._reserve(chunks):
            return chunks
        for chunk in chunks:
            while chunk.sequence.row is not None and not self._has_memory(chunk):
                if len(self.running) == 1:
                    raise StuckError(self.running, "the memory of this request was promised and is not there")
                self.preempt(next(iter(self._over_due() or ()), None))
        return [chunk for chunk in chunks if chunk.sequence.row is not None]

    def _has_memory(self, chunk: Chunk) -> bool:
        """Take the pages of a chunk, if prefixes that nobody uses make room for them."""
        while not self._reserve([chunk]):
            if not self._prefixes.evict_one():
                return False
        return True

    def _reserve(self, chunks: Sequence[Chunk]) -> bool:
        rows = np.array([chunk.sequence.row for chunk in chunks], np.int64)
        return self.allocator.reserve(rows, np.array([chunk.stop for chunk in chunks], np.int64))

    def with_drafts(self, chunks: Sequence[Chunk], drafts: Sequence[Sequence[int]]) -> list[Chunk]:
        """The chunks of a step, made longer by drafts as far as the step and the memory allow; nobody gives way."""
        left = self._step_tokens - sum(chunk.stop - chunk.start for chunk in chunks)
        longer = []
        for chunk, tried in zip(chunks, drafts, strict=True):
            tried = tuple(tried[:left])
            grown = Chunk(chunk.sequence, chunk.start, chunk.stop + len(tried), 1 + len(tried), tried)
            if tried and self._reserve([grown]):
                left -= len(tried)
                chunk = grown
            longer.append(chunk)
        return longer

    def preempt(self, sequence: TokenSequence | None = None) -> None:
        """Send a running sequence back into the queue, the youngest if none is named."""
        sequence = sequence or self.running[-1]
        self.running.remove(sequence)
        assert sequence.row is not None
        self._prefixes.store(sequence, min(sequence.computed, sequence.known))
        self.allocator.release(sequence.row)
        sequence.restart()
        insort(self.waiting, sequence, key=_age)
        self.preemptions += 1
        self._changed = True


def _piece(sequence: TokenSequence, cell: float) -> float:
    """What the next piece that cannot be cut costs, in tokens."""
    return sequence.work(sequence.computed, sequence.computed + sequence.next_piece(), cell)


def _age(sequence: TokenSequence) -> int:
    return sequence.request_id
