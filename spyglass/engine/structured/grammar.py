"""Structured output: JSON by schema, a regular expression, a choice, a grammar; compiled and followed by `llguidance`.

A grammar allows a set of next tokens. The sets of one step are computed while the model runs, in a thread of their own,
and cut the logits before a token is drawn. Compiling happens where a request is checked, never in the step loop, and
another process tries it first.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import llguidance
import numpy as np
import torch
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from spyglass.config.model import ModelConfig
from spyglass.engine.detokenize import TokenBytes
from spyglass.engine.request import Structured
from spyglass.engine.structured.compile import (
    MAX_GRAMMAR_CHARS,
    MAX_REPEATS,
    Words,
    compile_grammar,
    first_line,
    patterns_of,
    repeats,
    run_deep,
)
from spyglass.engine.structured.sandbox import GrammarSandbox
from spyglass.engine.structured.schema_is_finite import schema_is_finite
from spyglass.errors import PromptError

KEPT, _KEPT_SECONDS = 256, 8.0  # compiled grammars; what takes long to compile takes memory, some hundred MB a second


class GrammarMatcher:
    """Where one answer is in its grammar, which with `after` (a token id) begins behind that token; it must come."""

    __slots__ = ("_after", "_matcher", "_tokens", "failed")

    def __init__(self, matcher: llguidance.LLMatcher, after: int | None) -> None:
        self._matcher, self._after = matcher, after
        self._tokens = 0 if after is None else -1  # behind the beginning of the grammar; below 0: before it
        self.failed: str | None = None  # why no answer can follow the grammar

    @property
    def library(self) -> llguidance.LLMatcher:
        """The matcher of `llguidance`."""
        return self._matcher

    @property
    def begun(self) -> bool:
        """Whether the next token must follow the grammar; before, it may only not end the answer."""
        return self._tokens >= 0

    def copy(self) -> GrammarMatcher:
        """The same grammar for another answer, from its beginning."""
        assert self._tokens <= 0
        return GrammarMatcher(self._matcher.deep_copy(), self._after)

    def push(self, token: int) -> str | None:
        """Take one drawn token; what went wrong, or None."""
        if not self.begun:
            self._tokens = 0 if token == self._after else -1
            return None
        if self.failed is None and not self._matcher.consume_token(token):
            self.failed = f"the answer cannot go on in the form asked for: {first_line(self._matcher.get_error())}"
        self._tokens += 1
        return self.failed

    def rollback(self, tokens: int) -> None:
        """Take back the tokens that were pushed last."""
        assert self.failed is None
        inside = max(0, min(tokens, self._tokens))
        if inside:
            self._matcher.rollback(inside)
        self._tokens -= inside
        if tokens > inside and self._after is not None:
            self._tokens = -1

    def fill_along(self, words_RW: NDArray[np.int32], row: int, drafts: Sequence[int]) -> None:
        """Bits of the allowed next tokens into rows `row` and on, for the next token and behind each of `drafts`.

        Behind a draft that is not allowed anything is: it will not be kept.
        """
        begun, taken = self.begun, 0
        for number in range(len(drafts) + 1):
            if begun:
                fill_next_token_bitmask(self._matcher, words_RW, row + number)
            if number == len(drafts):
                break
            if not begun:
                begun = drafts[number] == self._after
            elif self._matcher.try_consume_tokens([drafts[number]]):
                taken += 1
            else:
                break
        if taken:
            self._matcher.rollback(taken)

    @property
    def complete(self) -> bool:
        """Whether nothing can follow: the answer ends here."""
        return bool(self.begun and self._matcher.is_stopped())


class MinLength:
    """Lets none of `ends` be drawn before an answer has `tokens` tokens; stands where a `GrammarMatcher` does."""

    __slots__ = ("_left", "_words", "failed")

    def __init__(self, tokens: int, ends: Collection[int], vocab_size: int) -> None:
        self._left = tokens
        allowed_V = np.ones(-(-vocab_size // 32) * 32, np.uint8)
        allowed_V[list(ends)] = 0
        self._words = np.packbits(allowed_V, bitorder="little").view(np.int32)
        self.failed: str | None = None  # as of a grammar

    complete = False  # it ends no answer

    def copy(self) -> MinLength:
        """The same for another answer, from its beginning."""
        found = MinLength(self._left, (), 1)
        found._words = self._words
        return found

    def push(self, token: int) -> None:
        self._left -= 1

    def rollback(self, tokens: int) -> None:
        """Take back the tokens that were pushed last."""
        self._left += tokens

    def fill_along(self, words_RW: NDArray[np.int32], row: int, drafts: Sequence[int]) -> None:
        """Bits of the allowed next tokens into rows `row` and on, for the next token and behind each of `drafts`."""
        for number in range(len(drafts) + 1):
            words_RW[row + number] = self._words if self._left > number else -1


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps them. Any thread may call it.

    `cpu_seconds`: what compiling one may take; it is tried first in a process of its own.
    """

    def __init__(self, token_bytes: TokenBytes, config: ModelConfig, *, cpu_seconds: float) -> None:
        self._bytes, self._tokenizer = token_bytes, token_bytes.tokenizer
        self._vocab_size, self._eos = config.text.vocab_size, sorted(config.eos_token_ids)
        self._lock, self._cpu_seconds = threading.Lock(), cpu_seconds
        self._library: tuple[llguidance.LLTokenizer, GrammarSandbox] | None = None
        self._compiled: OrderedDict[str, tuple[llguidance.LLMatcher, float]] = OrderedDict()  # with seconds

    def begin(self, structured: Structured) -> GrammarMatcher:
        """The matcher of a new answer; compiles it unless the same one was asked for before.

        Raises:
            PromptError: the schema, pattern or grammar means nothing, is too large, or needs a token this tokenizer
                does not have.
        """
        after = None
        if structured.after is not None:
            after = self._tokenizer.special_id(structured.after)
            if after is None:
                raise PromptError(f"the tokenizer has no special token {structured.after!r} for a form to follow")
        request = _request(structured)
        with self._lock:
            (vocabulary, trials), found = self._open_library(), self._compiled.get(request)
        if found is None:  # without the lock: it may take seconds, and others' grammars are ready
            seconds = trials.seconds(structured.kind, request)
            if structured.kind == "json_schema" and not schema_is_finite(structured.value):
                raise PromptError("the json_schema asked for has no value that ends: what it requires refers to itself")
            found = self._compile(structured, vocabulary), seconds
        with self._lock:
            matcher, _ = self._compiled.setdefault(request, found)
            self._compiled.move_to_end(request)
            self._forget()
            return GrammarMatcher(matcher.deep_copy(), after)

    def _compile(self, structured: Structured, vocabulary: llguidance.LLTokenizer) -> llguidance.LLMatcher:
        try:
            return run_deep(partial(compile_grammar, structured.kind, structured.value, vocabulary), self._lock)
        except ValueError as error:
            raise PromptError(str(error)) from error

    def _forget(self) -> None:
        """Keep what was asked for last, within the bounds."""
        while len(self._compiled) > 1 and (
            len(self._compiled) > KEPT or sum(seconds for _, seconds in self._compiled.values()) > _KEPT_SECONDS
        ):
            self._compiled.popitem(last=False)

    def _open_library(self) -> tuple[llguidance.LLTokenizer, GrammarSandbox]:
        if self._library is None:
            if not self._eos:
                raise PromptError("structured answers need a token that ends an answer; config.json names none")
            words = self._words()
            self._library = words.vocabulary(), GrammarSandbox(words, cpu_seconds=self._cpu_seconds)
        return self._library

    def _words(self) -> Words:
        """Added tokens are no way to spell text."""
        tokens = [self._bytes[token] for token in range(self._vocab_size)]
        added = self._tokenizer.added_ids
        silent = [token for token, spelled in enumerate(tokens) if token in added or not spelled]
        return Words(tokens, silent, self._eos, self._tokenizer.encode_text)


Matcher = GrammarMatcher | MinLength


class GrammarMasks:
    """Next-token masks of one step, computed while the model runs. Holds its thread and what it has measured.

    A grammar that leaves nothing but `banned` tokens has failed: its row is free, and what is drawn there is not used.
    `ends` are the tokens that end an answer, which has to reach its grammar first.
    """

    def __init__(self, vocab_size: int, banned: Sequence[int] = (), ends: Sequence[int] = ()) -> None:
        self._vocab_size = vocab_size
        before_V = np.ones(-(-vocab_size // 32) * 32, np.uint8)
        before_V[list(ends)] = 0
        self._before = np.packbits(before_V, bitorder="little").view(np.int32)  # what may come before a grammar begins
        self._usable = torch.ones(vocab_size, dtype=torch.bool)
        self._usable[list(banned)] = False
        self._executor: llguidance.LLExecutor | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="spyglass-masks")
        self.seconds = 0.0  # spent on masks
        self.waited = 0.0  # of it, not hidden behind the model

    @property
    def hidden_share(self) -> float | None:
        """Share of the work that no step waited for; None before there was any."""
        return None if self.seconds == 0 else max(0.0, 1 - self.waited / self.seconds)

    def begin(self, rows: Sequence[tuple[Matcher, Sequence[int]]]) -> Callable[[], torch.Tensor]:
        """Start on the masks of next tokens, and of those behind drafts (see `GrammarMatcher.fill_along`).

        The result waits and gives them, bool [R, V], True = allowed, 1 + len(drafts) rows for each matcher.
        """
        starts = np.cumsum([0, *(1 + len(drafts) for _, drafts in rows)]).tolist()
        job: Future[NDArray[np.int32]] = self._pool.submit(self._fill, rows, starts)

        def wait() -> torch.Tensor:
            start = time.perf_counter()
            words_RW = torch.from_numpy(job.result())
            self.waited += time.perf_counter() - start
            bit_B = torch.arange(32, dtype=torch.int32)
            allowed_RV = ((words_RW[:, :, None] >> bit_B) & 1).flatten(1)[:, : self._vocab_size].bool()
            empty = (~(allowed_RV & self._usable).any(dim=1)).tolist()
            for (matcher, _), (first, stop) in zip(rows, pairwise(starts), strict=True):
                if empty[first]:
                    matcher.failed = "the structured output asked for leaves only tokens that are never drawn"
                for row in range(first, stop):
                    allowed_RV[row] |= empty[row]
            return allowed_RV

        return wait

    def _fill(self, rows: Sequence[tuple[Matcher, Sequence[int]]], starts: Sequence[int]) -> NDArray[np.int32]:
        start = time.perf_counter()
        words_RW: NDArray[np.int32] = allocate_token_bitmask(starts[-1], self._vocab_size)
        words_RW[:] = self._before
        each = list(zip(rows, starts, strict=False))
        plain = [
            (matcher.library, row)
            for (matcher, drafts), row in each
            if isinstance(matcher, GrammarMatcher) and not drafts and matcher.begun
        ]
        if plain:
            if self._executor is None:
                self._executor = llguidance.LLExecutor()
            fill_next_token_bitmask_par(self._executor, plain, words_RW)
        for (matcher, drafts), row in each:
            if drafts or isinstance(matcher, MinLength):
                matcher.fill_along(words_RW, row, drafts)
        self.seconds += time.perf_counter() - start
        return words_RW


def _request(structured: Structured) -> str:
    """Kind and value as JSON: what a grammar is known by.

    Raises:
        PromptError: it is too long, or nothing that JSON can hold.
    """
    try:
        text = json.dumps([structured.kind, structured.value], allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise PromptError(f"the {structured.kind} asked for cannot be read: {error}") from error
    if len(text) > MAX_GRAMMAR_CHARS:
        raise PromptError(f"the {structured.kind} asked for has {len(text):,} characters; {MAX_GRAMMAR_CHARS:,} may be")
    patterns = [structured.value] if structured.kind == "regex" else patterns_of(structured.value)
    if (most := max(map(repeats, patterns), default=0)) > MAX_REPEATS:
        raise PromptError(
            f"the {structured.kind} asked for has a pattern with {most:,} parts that may be left out or repeated; "
            f"{MAX_REPEATS:,} may be: counts (a{{0,9}}) in place of copies"
        )
    return text
