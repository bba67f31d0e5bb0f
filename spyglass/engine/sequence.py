"""One request on its way: its tokens so far, how far the model has seen them, and what has come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.engine.detokenize import Detokenizer
from spyglass.engine.request import SamplingParams, TokenLogprob
from spyglass.engine.sampler import UsedTokens
from spyglass.engine.structured.grammar import GrammarMatcher
from spyglass.lora.use import NO_ADAPTER, AdapterHandle
from spyglass.prompt.tokens import Prompt, TokenKind
from spyglass.prompt.visibility import legal_cuts

if TYPE_CHECKING:
    from spyglass.engine.cache.prefix import PrefixHashes

_ROOM = 256  # answer tokens a buffer has room for before it first grows


class TokenCounts:
    """Distinct ids of prompt and answer with their counts in the answer, kept as arrays for the sampler."""

    __slots__ = ("_counts", "_ids", "_place")

    def __init__(self, prompt_ids: NDArray[np.int32]) -> None:
        ids = np.unique(prompt_ids[prompt_ids >= 0]).astype(np.int64)
        self._place = {token: place for place, token in enumerate(ids.tolist())}
        self._ids = np.concatenate([ids, np.zeros(_ROOM, np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)

    def add(self, token: int) -> None:
        """Count one answer token."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def used(self) -> UsedTokens:
        """What `sampler.penalise` reads."""
        return UsedTokens(ids_J=self._ids[: len(self._place)], counts_J=self._counts[: len(self._place)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and its parameters, checked by `Engine.prepare`; `matcher` is at the beginning of the answer's grammar.

    It may be submitted any number of times.
    """

    prompt: Prompt
    params: SamplingParams
    matcher: GrammarMatcher | None = None


class TokenSequence:
    """Tokens of one request. `computed` of its `length` tokens have their rows in memory.

    `limit` bounds the answer. `is_greedy`: each token is simply that of the largest logit. `row` is its page-table row,
    None while it waits. `served` is the last step that ran it. `sink` float32 [T, V] receives the logits of every
    prompt row. `reached` is the most that was computed before it was preempted, `cached` counts tokens that never were,
    thanks to the prefix cache, which keeps its `names` here.
    """

    __slots__ = (
        "_cuts",
        "_ids",
        "_kinds",
        "adapter",
        "answer",
        "cached",
        "computed",
        "counts",
        "detokenizer",
        "image_rows",
        "is_greedy",
        "length",
        "limit",
        "logprobs",
        "matcher",
        "names",
        "params",
        "prompt",
        "prompt_logprobs",
        "reached",
        "request_id",
        "row",
        "seed",
        "served",
        "sink",
        "text",
    )

    def __init__(
        self,
        request_id: int,
        prompt: Prompt,
        params: SamplingParams,
        *,
        limit: int,
        seed: int,
        detokenizer: Detokenizer | None,
        sink: torch.Tensor | None = None,
        adapter: AdapterHandle = NO_ADAPTER,
        matcher: GrammarMatcher | None = None,
    ) -> None:
        self.adapter, self.matcher = adapter, matcher
        self.request_id, self.prompt, self.params = request_id, prompt, params
        self.is_greedy = matcher is None and params.is_greedy
        self.limit, self.seed, self.detokenizer, self.sink = limit, seed, detokenizer, sink
        self.length = len(prompt)
        self.computed = self.reached = self.cached = 0
        self.names: PrefixHashes | None = None
        self.row: int | None = None
        self.served = -1
        self.answer: list[int] = []
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None] * len(prompt)
        self.image_rows: dict[int, torch.Tensor] = {}
        self.counts = TokenCounts(prompt.ids_T) if params.penalised else None
        room = min(limit, _ROOM)
        self._ids = np.concatenate([prompt.ids_T, np.zeros(room, np.int32)])
        self._kinds = np.concatenate([prompt.kinds_T, np.full(room, TokenKind.TEXT, np.int8)])
        self._cuts = _cuts(prompt)

    @property
    def pending(self) -> int:
        """Known tokens whose rows are not in memory yet."""
        return self.length - self.computed

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether somebody wants to see what the model says at every position of the prompt."""
        return self.sink is not None or self.params.prompt_logprobs is not None

    def resume_from(self, tokens: int) -> None:
        """The rows of the first `tokens` tokens, more than there were, have been found in memory."""
        self.cached += max(0, tokens - max(self.reached, self.computed))
        self.computed = tokens

    def append(self, token: int) -> None:
        """One more answer token."""
        if self.length == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._kinds = np.concatenate([self._kinds, np.full_like(self._kinds, TokenKind.TEXT)])
        self._ids[self.length] = token
        self.length += 1
        self.answer.append(token)
        if self.counts is not None:
            self.counts.add(token)

    def restart(self) -> None:
        """Give up all rows in memory: prompt and answer so far are to be run again. What has been drawn stays."""
        self.reached = max(self.reached, self.computed)
        self.computed = 0
        self.row = None
        self.image_rows.clear()

    def cut_at_most(self, place: int) -> int:
        """The last legal end of a step at or before position `place`; never inside a span (spec v4 6.4)."""
        if self._cuts is None or place > self._cuts[-1]:
            return place
        return int(self._cuts[np.searchsorted(self._cuts, place, side="right") - 1])

    def next_piece(self) -> int:
        """Fewest tokens that a step can take from here on."""
        if self._cuts is None or self.computed >= self._cuts[-1]:
            return 1
        return int(self._cuts[np.searchsorted(self._cuts, self.computed, side="right")]) - self.computed

    def longest_piece(self) -> int:
        """Tokens of the longest stretch that cannot be cut."""
        return 1 if self._cuts is None else int(np.diff(self._cuts).max())

    def ids(self, start: int, stop: int) -> NDArray[np.int32]:
        """Token ids, -1 at picture positions."""
        return self._ids[start:stop]

    def kinds(self, start: int, stop: int) -> NDArray[np.int8]:
        """Token kinds."""
        return self._kinds[start:stop]

    def lookback(self, start: int, depth: int) -> NDArray[np.int32]:
        """Ids of the `depth` tokens before position `start`, nearest first: -1 before the first, -2 at pictures."""
        first = max(0, start - depth)
        ids = np.where(self._kinds[first:start] >= 0, -2, self._ids[first:start])[::-1]
        return np.concatenate([ids, np.full(depth - len(ids), -1)]).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, stop) of a sequence run in the next step."""

    sequence: TokenSequence
    start: int
    stop: int

    @property
    def draws(self) -> bool:
        """Whether the step ends with a new token for this sequence."""
        return self.stop == self.sequence.length and len(self.sequence.answer) < self.sequence.limit


def matchers_of(drawing: Sequence[TokenSequence]) -> list[tuple[int, GrammarMatcher]]:
    """Rows of answers that follow a grammar, and their matchers."""
    return [(row, s.matcher) for row, s in enumerate(drawing) if s.matcher is not None]


def _cuts(prompt: Prompt) -> NDArray[np.int64] | None:
    """Legal cuts of 0..T, rising; None when every cut is legal."""
    legal = legal_cuts(prompt)
    return None if legal.all() else np.flatnonzero(legal)
