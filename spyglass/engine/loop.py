"""The loop of steps, one of which may run ahead of what the host knows.

On a device that runs behind the host, a step is planned and started before the tokens of the step before it are read:
its input ids are taken over on the device. Only then are these tokens read, masks and penalties brought up to date, and
the tokens of the new step sampled. So the device never waits for the host. An answer that turns out to have ended has
one row too much in the step under way, which changes nothing: work on the device is done in order, so pages that are
given back now are written again only after that step.

On a CPU a step with prompts may take long. Between its layers, steps of the answers that are not in it run from start
to end (`_go_on`): an answer waits for the prompts of others about `Pace.slice_s` and a layer, or for twice what a step
of answers takes, if that is more, so that prompts have two thirds of the time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from spyglass.engine.answers import keep_prompt_logprobs, last_delta
from spyglass.engine.cache.allocator import CacheAllocator
from spyglass.engine.cache.images import ImageCache
from spyglass.engine.cache.prefix import PrefixCache
from spyglass.engine.drafts import Drafter
from spyglass.engine.request import Delta, FinishReason, TokenLogprob
from spyglass.engine.runner import Runner, RunningStep
from spyglass.engine.scheduler import Scheduler, StuckError
from spyglass.engine.sequence import Chunk, TokenSequence
from spyglass.engine.shares import Pace
from spyglass.engine.stats import Counters
from spyglass.engine.structured.grammar import GrammarMasks
from spyglass.errors import is_recoverable

_FAILED = "the model failed in a step of this request"
_LOG = logging.getLogger(__name__)
LOGITS_AT_ONCE = 1 << 24  # elements of one block of logits when every row is wanted
_Masking = Callable[[], torch.Tensor] | None  # next tokens of rows that follow a grammar, once known


class StepLoop:
    """Sequences in, deltas out. `ahead`: steps run one ahead, unless a drafter needs the tokens of each step."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        allocator: CacheAllocator,
        prefixes: PrefixCache,
        images: ImageCache,
        masks: GrammarMasks,
        pace: Pace,
        *,
        ahead: bool,
        lookahead: int = 0,
        drafter: Drafter | None = None,
    ) -> None:
        self._runner, self._scheduler, self._allocator = runner, scheduler, allocator
        self._prefixes, self._images, self.masks, self._pace = prefixes, images, masks, pace
        self._lookahead, self._drafter = lookahead, drafter
        self._ahead = ahead and drafter is None
        self.sequences: dict[int, TokenSequence] = {}
        self._running: RunningStep | None = None
        self._lost: list[Delta] = []  # deltas for the next call of `step`
        self._outer: Sequence[Chunk] = ()  # those of the step between whose layers others may run
        self._is_within = False  # such another runs
        self._within_s = 0.0  # what they took in this step
        self._within_error: BaseException | None = None
        self._answered = self._layer_began = 0.0  # when answers had a step last, and when a layer began
        self._answers_s = 0.0  # what the last step of answers between layers took
        self._deliver: Callable[[list[Delta]], object] | None = None
        self.counted = Counters()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.sequences or self._lost)

    def add(self, sequence: TokenSequence) -> None:
        """Queue a sequence.

        Raises:
            CapacityError: as `Scheduler.add`.
        """
        self._scheduler.add(sequence)
        self.sequences[sequence.request_id] = sequence
        self.counted.prompt_tokens += len(sequence.prompt)

    def abort(self, request_id: int) -> Delta | None:
        """End a request now; its last delta, or None if it is not running."""
        sequence = self.sequences.get(request_id)
        return None if sequence is None else self._end(sequence, "abort")

    def clear(self) -> None:
        """End all requests; nobody hears of it."""
        for request_id in list(self.sequences):
            self.abort(request_id)
        self._lost.clear()
        self._running = None

    def truncate(self, request_id: int, tokens: int) -> None:
        """As `Engine.truncate`."""
        if self._running is not None:
            self._lost += self._collect()
        sequence = self.sequences.get(request_id)
        if sequence is None:  # it has ended
            return
        sequence.answer.truncate(tokens)
        self._keep(sequence, sequence.known - tokens)

    def step(self, deliver: Callable[[list[Delta]], object] | None = None) -> list[Delta]:
        if self._lost:
            lost, self._lost = self._lost, []
            return lost
        chunks: Sequence[Chunk] = []
        deltas: list[Delta] = []
        early: list[Delta] = []  # of steps between the layers, if nobody takes them at once
        self._deliver, self._within_s, done = deliver or early.extend, 0.0, False
        began = self._layer_began = time.perf_counter()
        try:
            with torch.inference_mode():
                chunks = self._plan()
                if self._running is not None and (not chunks or self._runner.needs_ids):
                    deltas += self._collect()
                    chunks = [chunk for chunk in chunks if self._is_live(chunk.sequence)]
                if chunks:
                    self._outer = chunks
                    self._go_on()
                    self._run(chunks, deltas, began)
            done = True
            self._count(chunks, deltas, time.perf_counter() - began - self._within_s)
        except StuckError as error:
            self._lost = self._give_up(error.sequences, str(error))
            raise
        finally:
            self._outer = ()
            failed, self._within_error = self._within_error, None
            deltas[:0] = early
            if not done:
                self._fail(deltas, chunks)
        if failed is not None:
            self._lost = deltas + self._lost
            raise failed
        return deltas

    def _go_on(self) -> None:
        """Before a layer of a step: a step of all answers that are not in it, if they cannot wait for its end."""
        now = time.perf_counter()
        layer_s, self._layer_began = now - self._layer_began, now
        wait_s = self._pace.wait_s(self._answers_s)
        if self._is_within or wait_s is None or now + layer_s < self._answered + wait_s:
            return
        chunks = self._scheduler.answers([chunk.sequence.request_id for chunk in self._outer])
        if not chunks:
            return
        deltas: list[Delta] = []
        self._is_within = True
        try:
            chunks = self._with_drafts(chunks)
            self._run(chunks, deltas, now)
            self._count(chunks, deltas, time.perf_counter() - now)
        except BaseException as error:
            self._fail(deltas, chunks)
            if not is_recoverable(error):
                raise
            self._within_error = error  # told behind the step around it, which goes on
        else:
            assert self._deliver is not None
            self._deliver(deltas)
        finally:
            self._is_within = False
            self._layer_began = time.perf_counter()
            self._answers_s = self._layer_began - now
            self._within_s += self._answers_s

    def _fail(self, deltas: list[Delta], chunks: Sequence[Chunk]) -> None:
        """End the requests of a step that failed, behind the tokens of the step before it."""
        try:
            if self._running is not None:
                deltas += self._collect()
        finally:
            lost = [*chunks, *(() if self._running is None else self._running.chunks)]
            self._running = None
            self._lost = deltas + self._lost + self._give_up([chunk.sequence for chunk in lost], _FAILED)

    def _plan(self) -> list[Chunk]:
        return self._with_drafts(self._scheduler.schedule())

    def _with_drafts(self, chunks: list[Chunk]) -> list[Chunk]:
        """Chunks with drafts behind answers."""
        if self._drafter is None:
            return chunks
        most = [
            min(self._lookahead, chunk.sequence.answer.limit - len(chunk.sequence.answer.token_ids) - 1)
            if chunk.rows_wanted and chunk.stop > len(chunk.sequence.prompt)
            else 0
            for chunk in chunks
        ]
        drafts = self._drafter.propose([chunk.sequence for chunk in chunks], most)
        return self._scheduler.with_drafts(chunks, drafts)

    def _run(self, chunks: Sequence[Chunk], deltas: list[Delta], began: float) -> None:
        """Start a step, planned from `began` on, and bring the one before it to an end, or itself where none runs
        ahead."""
        masks = None if self._running is not None else self._begin_masks(chunks)
        ranges = [(chunk.sequence.row, chunk.start, chunk.stop) for chunk in chunks]
        rows, start, stop = np.array(ranges, np.int64).T
        positions = [self._prefixes.snapshot_positions(chunk.sequence, chunk.start, chunk.stop) for chunk in chunks]
        resumable = [(number, position) for number, each in enumerate(positions) for position in each]
        self._allocator.allocate(rows, start, stop, [(int(rows[number]), position) for number, position in resumable])
        for chunk in chunks:
            chunk.sequence.in_flight += 1
            if chunk.rows_wanted:
                chunk.sequence.expect(chunk.drafts)
        ahead = [(s, n) for s, n in self._scheduler.encode_ahead if s.row is not None and self._is_live(s)]
        go_on = None if self._is_within or self._pace.slice_s is None else self._go_on
        step = self._runner.run(chunks, resumable, self._running, ahead, go_on)
        step.began = began + self._within_s
        self._score(step)
        if self._running is not None:
            deltas += self._collect()
            masks = self._begin_masks([chunk for chunk in chunks if self._is_live(chunk.sequence)])
        if self._drafter is None:
            self._retire(step)
        deltas += [self._end(c.sequence, "length") for c in chunks if c.ends_answer and self._is_live(c.sequence)]
        sampling = [chunk for chunk in chunks if chunk.rows_wanted and self._is_live(chunk.sequence)]
        if sampling:
            allowed = None if masks is None else masks()
            drawing = time.perf_counter()
            self._runner.sample(step, sampling, allowed)
            self.counted.sampling_seconds += time.perf_counter() - drawing
        self._running = step
        if not self._ahead:
            deltas += self._collect()
            if self._drafter is not None:
                self._retire(step)
                self._drafter.observe(step)

    def _is_live(self, sequence: TokenSequence) -> bool:
        return sequence.request_id in self.sequences

    def _begin_masks(self, chunks: Sequence[Chunk]) -> _Masking:
        rows = [(c.sequence.answer.matcher, c.drafts) for c in chunks if c.rows_wanted]
        followed = [(matcher, drafts) for matcher, drafts in rows if matcher is not None]
        return self.masks.begin(followed) if followed else None

    def _retire(self, step: RunningStep) -> None:
        """Leave snapshots of a step that runs, and give back pages behind the retention."""
        for number, position in step.resumable:
            sequence = step.chunks[number].sequence
            if sequence.row is not None and position <= min(sequence.computed, sequence.known):
                self._prefixes.store(sequence, position)
        live = [(c.sequence.row, c.sequence.computed) for c in step.chunks if c.sequence.row is not None]
        rows_S2 = np.array(live, np.int64).reshape(-1, 2)
        self._allocator.release_expired(rows_S2[:, 0], rows_S2[:, 1])

    def _collect(self) -> list[Delta]:
        """Read the tokens of the step under way and add them to their answers."""
        step = self._running
        assert step is not None
        began = time.perf_counter()
        tokens = None if step.sampled is None else step.sampled.read()  # what went wrong on the device is raised here
        self.counted.sampling_seconds += time.perf_counter() - began
        self._running = None
        for chunk in step.chunks:
            chunk.sequence.in_flight -= 1
        deltas: list[Delta] = []
        prompts = sum([chunk.stop - chunk.start for chunk in step.chunks if chunk.is_prompt])
        answers = not all(chunk.is_prompt for chunk in step.chunks)
        if not self._is_within:
            self._pace.ran(step.began, prompts, step.encoded, answers=answers, read=tokens is not None)
        if answers:
            self._answered = time.perf_counter()
        if tokens is None:
            return deltas
        drawn = zip(tokens.ids, tokens.logprobs, tokens.is_finite, strict=True)
        for chunk in step.sampling:
            rows = [next(drawn) for _ in range(chunk.rows_wanted)]
            for number, (token, logprob, is_finite) in enumerate(rows):
                if not self._is_live(chunk.sequence):  # it has ended
                    break
                deltas.append(self._accept(chunk.sequence, token, logprob, is_finite))
                if chunk.drafts[number : number + 1] != (token,):
                    break
            if chunk.drafts and self._is_live(chunk.sequence):
                self._keep(chunk.sequence, chunk.sequence.known)
        return deltas

    def _keep(self, sequence: TokenSequence, tokens: int) -> None:
        """Leave a sequence its first `tokens` tokens; if that takes memory that is not there, it is run again."""
        sequence.truncate(tokens)
        if sequence.row is not None and not self._prefixes.truncate(sequence.row, sequence.computed):
            self._scheduler.preempt(sequence)

    def _count(self, chunks: Sequence[Chunk], deltas: Sequence[Delta], seconds: float) -> None:
        counted = self.counted
        counted.steps += bool(chunks)
        counted.step_seconds += seconds
        counted.computed_tokens += sum([chunk.stop - chunk.start for chunk in chunks])
        counted.generated_tokens += sum([len(delta.token_ids) for delta in deltas])

    def _score(self, step: RunningStep) -> None:
        """Logits of all rows of those who want them, in blocks so that no second [T, V] exists."""
        size = max(1, LOGITS_AT_ONCE // self._runner.vocab_size)
        for chunk, first in zip(step.chunks, step.first, strict=True):
            sequence = chunk.sequence
            stop = min(chunk.stop, len(sequence.prompt))
            if not sequence.wants_prompt_rows:
                continue
            for start in range(chunk.start, stop, size):
                count, row = min(size, stop - start), first + start - chunk.start
                logits_RV = self._runner.logits(step, row, row + count)
                if sequence.sink is not None:
                    sequence.sink[start : start + count] = logits_RV
                if sequence.params.prompt_logprobs is not None:
                    keep_prompt_logprobs(sequence, start, logits_RV)
                self._go_on()

    def _accept(self, sequence: TokenSequence, token: int, logprob: TokenLogprob | None, is_finite: bool) -> Delta:
        """Take a drawn token; whatever goes wrong with the text or the grammar of one answer ends only that answer."""
        if not is_finite:  # what made the logits so may lie in what is cached, so nothing of that is used again
            self._prefixes.clear()
            self._images.clear()
            return self._end(sequence, "abort", error="the model gave no finite logits for this request")
        answer = sequence.answer
        sequence.resolve(token)
        try:
            text = answer.push(token, logprob)
        except BaseException as error:
            if not is_recoverable(error):
                raise
            _LOG.exception("request %d is over", sequence.request_id)
            text = answer.finish(
                "abort", flush=False, error=f"the engine failed on this answer ({type(error).__name__})"
            )
        if answer.finish_reason is not None:
            self._release(sequence, reusable=answer.error is None)
            return last_delta(sequence, (token,), text)
        return Delta(
            request_id=sequence.request_id,
            text=text,
            token_ids=(token,),
            logprobs=None if logprob is None else (logprob,),
        )

    def _end(
        self, sequence: TokenSequence, reason: FinishReason, *, error: str | None = None, flush: bool = True
    ) -> Delta:
        self._release(sequence, reusable=error is None)
        return last_delta(sequence, (), sequence.answer.finish(reason, error=error, flush=flush))

    def _release(self, sequence: TokenSequence, *, reusable: bool) -> None:
        """Give back what a request held; the next turn of a chat may go on from its rows, if they are `reusable`."""
        if reusable and sequence.row is not None:
            self._prefixes.store(sequence, min(sequence.computed, sequence.known))
        if self.sequences.pop(sequence.request_id, None) is not None:
            self._scheduler.remove(sequence)

    def _give_up(self, sequences: Sequence[TokenSequence], why: str) -> list[Delta]:
        """End those of them that have not ended, with an error."""
        return [self._end(s, "abort", error=why, flush=False) for s in sequences if self._is_live(s)]
