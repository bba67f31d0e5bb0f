"""A request on its way: what was asked (`Request`), what has come out (`Answer`), how far it is (`TokenSequence`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.engine.detokenize import Detokenizer, DetokenizerState
from spyglass.engine.request import FinishReason, SamplingParams, TokenLogprob
from spyglass.engine.sampler import UsedTokens
from spyglass.engine.shares import ANYBODY, Client
from spyglass.engine.structured.grammar import Matcher
from spyglass.lora.use import NO_ADAPTER, AdapterHandle
from spyglass.prompt.tokens import Prompt, TokenKind
from spyglass.prompt.visibility import legal_cuts

if TYPE_CHECKING:
    from spyglass.engine.cache.prefix import PrefixHashes

UNKNOWN = -3  # id of a token that a step under way will give
_ROOM = 256  # answer tokens a buffer has room for before it first grows


class TokenCounts:
    """Distinct ids of prompt and answer with their counts in the answer, kept as arrays for the sampler."""

    __slots__ = ("_counts", "_ids", "_index", "_num_prompt")

    def __init__(self, prompt_ids: NDArray[np.int32]) -> None:
        ids = np.unique(prompt_ids[prompt_ids >= 0]).astype(np.int64)
        self._num_prompt = len(ids)
        self._index = {token: index for index, token in enumerate(ids.tolist())}
        self._ids = np.concatenate([ids, np.zeros(_ROOM, np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)

    def add(self, token: int) -> None:
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token
        self._counts[index] += 1

    def remove(self, token: int) -> None:
        """Take back the answer token that was counted last."""
        index = self._index[token]
        self._counts[index] -= 1
        if index >= self._num_prompt and not self._counts[index]:  # it came with this token, so it is the last
            del self._index[token]

    @property
    def used(self) -> UsedTokens:
        """What `sampler.penalise` reads."""
        return UsedTokens(ids_J=self._ids[: len(self._index)], counts_J=self._counts[: len(self._index)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and its parameters, checked by `Engine.prepare`; `matcher` is at the beginning of the answer's grammar,
    or of its least length.

    It may be submitted any number of times.
    """

    prompt: Prompt
    params: SamplingParams
    matcher: Matcher | None = None


class Answer:
    """What has been drawn for a request so far. `finish_reason` is set when it ends, `error` when the engine ended it.

    `limit` bounds its tokens, `ends` are ids that end it. `truncate` reaches back `lookahead` tokens.
    """

    def __init__(
        self,
        request: Request,
        *,
        limit: int,
        ends: Collection[int] = (),
        detokenizer: Detokenizer | None = None,
        lookahead: int = 0,
    ) -> None:
        self.limit, self.detokenizer = limit, detokenizer
        self.matcher = None if request.matcher is None else request.matcher.copy()
        self.counts = TokenCounts(request.prompt.ids_T) if request.params.penalised else None
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None] * len(request.prompt)
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self._ends, self._lookahead, self._longest = ends, lookahead, 0
        self._states = deque[DetokenizerState](maxlen=lookahead)  # before each of the last tokens

    @property
    def grammar_violation(self) -> bool:
        """Whether the structured output that was asked for made the answer fail."""
        return self.matcher is not None and self.matcher.failed is not None

    @property
    def revocable(self) -> int:
        """How many tokens can be taken back: `lookahead` of the most that there ever were."""
        count = len(self.token_ids)
        return min(count, self._lookahead - (self._longest - count))

    def push(self, token: int, logprob: TokenLogprob | None = None) -> str:
        """Take a token; the text that is certain now. Ends the answer where it ends."""
        if self._lookahead and self.detokenizer is not None:
            self._states.append(self.detokenizer.state)
        self.token_ids.append(token)
        self._longest = max(self._longest, len(self.token_ids))
        if self.counts is not None:
            self.counts.add(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        text, stopped = "", False
        error = None if self.matcher is None else self.matcher.push(token)
        if error is not None:
            return self.finish("abort", error=error)
        if token in self._ends:
            return self.finish("stop")
        if self.detokenizer is not None:
            text, stopped = self.detokenizer.push(token)
        self.texts.append(text)
        if stopped:
            self.finish_reason = "stop"
        elif self.matcher is not None and self.matcher.complete:
            text += self.finish("stop")
        elif len(self.token_ids) == self.limit:
            text += self.finish("length")
        return text

    def finish(self, reason: FinishReason, *, error: str | None = None, flush: bool = True) -> str:
        """End the answer; the text that was held back, unless it is not to be given (`flush`)."""
        text = ""
        if flush and self.detokenizer is not None:
            text, stopped = self.detokenizer.finish()
            reason = "stop" if stopped and reason != "abort" else reason
        self.texts.append(text)
        self.finish_reason, self.error = reason, error
        return text

    def truncate(self, tokens: int) -> None:
        """Take back the last `tokens` tokens of an answer that has not ended, as if they had never been drawn."""
        assert self.finish_reason is None and tokens <= self.revocable, f"{self.revocable} tokens can be taken back"
        for _ in range(tokens):
            token = self.token_ids.pop()
            self.texts.pop()
            if self.counts is not None:
                self.counts.remove(token)
            if self.logprobs:
                self.logprobs.pop()
        if tokens and self.detokenizer is not None:
            for _ in range(tokens):
                state = self._states.pop()
            self.detokenizer.state = state
        if tokens and self.matcher is not None:
            self.matcher.rollback(tokens)


class TokenSequence:
    """The tokens of a request and its answer, and how far they have been run.

    `length` tokens, of which the last `expected` are still being computed by steps under way: drafts and one unknown
    token. `computed` have their rows in memory, or will have them after the steps under way, `in_flight` of which run
    this sequence. `row` is its page-table row, None while it waits. `served` is the last step that ran it. `sink`
    float32 [T, V] receives the logits of every prompt row. `reached` is the most that was computed before it was
    preempted, `cached` counts tokens that never were, thanks to the prefix cache, which keeps its `prefix_hashes` here.
    `is_greedy`: each token is simply that of the largest logit.
    """

    def __init__(
        self,
        request_id: int,
        request: Request,
        answer: Answer,
        *,
        seed: int = 0,
        adapter: AdapterHandle = NO_ADAPTER,
        client: Client = ANYBODY,
        sink: torch.Tensor | None = None,
    ) -> None:
        self.client = client
        self.request_id, self.prompt, self.params, self.answer = request_id, request.prompt, request.params, answer
        self.seed, self.adapter, self.sink = seed, adapter, sink
        self.is_greedy = answer.matcher is None and request.params.is_greedy
        self.length = len(self.prompt)
        self.expected = self.computed = self.reached = self.cached = self.in_flight = 0
        self.prefix_hashes: PrefixHashes | None = None
        self.row: int | None = None
        self.served = -1
        self.image_rows: dict[int, torch.Tensor] = {}
        room = min(answer.limit, _ROOM)
        self._ids = np.concatenate([self.prompt.ids_T, np.zeros(room, np.int32)])
        self._kinds = np.concatenate([self.prompt.kinds_T, np.full(room, TokenKind.TEXT, np.int8)])
        self._cuts = _cuts(self.prompt)

    @property
    def known(self) -> int:
        """Tokens that are there for good."""
        return self.length - self.expected

    @property
    def draws_next(self) -> bool:
        """Whether the answer may have a token behind all those that are there or expected."""
        return self.length - len(self.prompt) < self.answer.limit

    @property
    def waits_for_steps(self) -> bool:
        """Whether nothing of it can run before steps under way have ended."""
        return self.in_flight > 0 and (self.pending < 1 or (self.expected > 0 and not self.draws_next))

    @property
    def pending(self) -> int:
        """Known tokens whose rows are not in memory yet."""
        return self.length - self.computed

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether somebody wants to see what the model says at every position of the prompt."""
        return self.sink is not None or self.params.prompt_logprobs is not None

    def expect(self, drafts: Sequence[int] = ()) -> None:
        """A step is under way that gives the token behind all these; `drafts` are what it tries as the next ones."""
        count = len(drafts) + 1
        while self.length + count > len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._kinds = np.concatenate([self._kinds, np.full_like(self._kinds, TokenKind.TEXT)])
        if drafts:
            self._ids[self.length : self.length + count - 1] = drafts
        self.length += count
        self._ids[self.length - 1] = UNKNOWN
        self.expected += count

    def resolve(self, token: int) -> None:
        """The first of the expected tokens has been drawn."""
        self._ids[self.length - self.expected] = token
        self.expected -= 1

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens, at least the prompt, none of them expected; rows behind them are gone."""
        self.length, self.expected = tokens, 0
        self.computed = min(self.computed, tokens - 1)
        if self.prefix_hashes is not None:
            self.prefix_hashes.truncate(tokens)

    def resume_from(self, tokens: int) -> None:
        """The rows of the first `tokens` tokens, more than there were, have been found in memory."""
        self.cached += max(0, tokens - max(self.reached, self.computed))
        self.computed = tokens

    def restart(self) -> None:
        """Give up all rows in memory: prompt and answer so far are to be run again. What has been drawn stays."""
        self.reached = max(self.reached, self.computed)
        self.computed = 0
        self.row = None
        self.image_rows.clear()

    def last_cut(self, position: int) -> int:
        """The last legal end of a step at or before `position`; never inside a span (spec v4 6.4)."""
        if self._cuts is None or position > self._cuts[-1]:
            return position
        return int(self._cuts[np.searchsorted(self._cuts, position, side="right") - 1])

    def next_piece(self) -> int:
        """Fewest tokens that a step can take from here on."""
        if self._cuts is None or self.computed >= self._cuts[-1]:
            return 1
        return int(self._cuts[np.searchsorted(self._cuts, self.computed, side="right")]) - self.computed

    def work(self, start: int, stop: int, cell: float) -> float:
        """What the tokens from `start` to `stop` cost, in tokens: a row of an image that they begin, and whose rows are
        not here yet, counts as `cell` tokens for the tower."""
        images = self.new_images(start, stop) if cell else []
        return stop - start + cell * sum(self._rows(image) for image in images)

    def reach(self, start: int, most: float, cell: float) -> int:
        """The last legal end of a step at which the tokens from `start` on cost at most `most` (see `work`)."""
        stop = start + most
        for image in self.new_images(start, self.length) if cell else ():
            first = max(start, self.prompt.spans[image].start)
            if first >= stop:
                break
            stop -= cell * self._rows(image)
            if stop <= first:
                return max(start, self.last_cut(first))
        return max(start, self.last_cut(min(int(stop), self.length)))

    def new_images(self, start: int, stop: int) -> list[int]:
        """Images that the tokens from `start` to `stop` begin, or go on with where nothing of them is here."""
        if start >= len(self.prompt):
            return []
        first = 0 if start == self.computed else start  # what began before belongs to a piece before this one
        spans = [s for s in self.prompt.spans if first <= s.start < stop and s.start + s.length > start]
        return [span.image for span in spans if span.image not in self.image_rows]

    def _rows(self, image: int) -> int:
        rows, columns = self.prompt.plans[image].llm_grid
        return rows * columns

    def longest_piece(self) -> int:
        """Tokens of the longest stretch that cannot be cut."""
        return 1 if self._cuts is None else int(np.diff(self._cuts).max())

    def ids(self, start: int, stop: int) -> NDArray[np.int32]:
        """Token ids, -1 at image positions."""
        return self._ids[start:stop]

    def kinds(self, start: int, stop: int) -> NDArray[np.int8]:
        return self._kinds[start:stop]

    def lookback(self, start: int, depth: int) -> NDArray[np.int32]:
        """Ids of the `depth` tokens before position `start`, nearest first: -1 before the first, -2 at images."""
        first = max(0, start - depth)
        ids = np.where(self._kinds[first:start] >= 0, -2, self._ids[first:start])[::-1]
        return np.concatenate([ids, np.full(depth - len(ids), -1)]).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, stop) of a sequence run in the next step; a token is sampled for each of the last `rows_wanted`.

    `drafts` are the last tokens of the chunk, if they are only tried.
    """

    sequence: TokenSequence
    start: int
    stop: int
    rows_wanted: int
    drafts: tuple[int, ...] = ()

    @classmethod
    def of(cls, sequence: TokenSequence, stop: int) -> Chunk:
        """The tokens of a sequence that have not run, up to `stop`."""
        draws = stop == sequence.length and sequence.draws_next
        return cls(sequence, sequence.computed, stop, int(draws))

    @property
    def is_prompt(self) -> bool:
        """Whether it runs more than the last token of an answer and drafts behind it."""
        return self.stop - self.start - len(self.drafts) > 1 or self.start < len(self.sequence.prompt)

    @property
    def ends_answer(self) -> bool:
        """Whether the request ends with this chunk: the whole prompt is run, and no token is wanted."""
        return self.stop == len(self.sequence.prompt) and not self.sequence.answer.limit


def _cuts(prompt: Prompt) -> NDArray[np.int64] | None:
    """Legal cuts of 0..T, rising; None when every cut is legal."""
    legal = legal_cuts(prompt)
    return None if legal.all() else np.flatnonzero(legal)
