"""Answers in a form: JSON by schema, a regular expression, a choice, a grammar; compiled and followed by `llguidance`.

A form allows a set of next tokens. The sets of one step are computed while the model runs, in a thread of their own,
and cut the logits before a token is drawn. Compiling happens where a request is checked, never in the step loop, and
another process tries it first.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import llguidance
import numpy as np
import torch
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from spyglass.config.model import ModelConfig
from spyglass.engine.detokenize import TokenBytes
from spyglass.engine.request import Structured
from spyglass.engine.structured.compile import Words, compile_grammar, first_line, run_deep
from spyglass.engine.structured.sandbox import GrammarSandbox
from spyglass.engine.structured.schema_is_finite import schema_is_finite
from spyglass.errors import PromptError

KEPT, _KEPT_SECONDS = 256, 8.0  # compiled forms; what takes long to compile takes memory, some hundred MB a second
MAX_GRAMMAR_CHARS = 1 << 18  # characters of a form: what one level of references takes of the stack, its text bounds


class GrammarMatcher:
    """Where one answer is in its form. With `after` (a token id) the form begins behind that token, which must come."""

    __slots__ = ("_after", "_matcher", "failed")

    def __init__(self, matcher: llguidance.LLMatcher, after: int | None) -> None:
        self._matcher, self._after = matcher, after
        self.failed: str | None = None  # why no answer can have this form

    @property
    def begun(self) -> bool:
        """Whether the next token must follow the form; before, it may only not end the answer."""
        return self._after is None

    @property
    def matcher(self) -> llguidance.LLMatcher:
        """What `GrammarMasks` asks for the next token's mask."""
        return self._matcher

    def copy(self) -> GrammarMatcher:
        """The same form for another answer, which is as far in it."""
        return GrammarMatcher(self._matcher.deep_copy(), self._after)

    def push(self, token: int) -> str | None:
        """Take one drawn token; what went wrong, or None."""
        if self._after is not None:
            if token == self._after:
                self._after = None
            return None
        if self.failed is None and not self._matcher.consume_token(token):
            self.failed = f"the answer cannot go on in the form asked for: {first_line(self._matcher.get_error())}"
        return self.failed

    @property
    def complete(self) -> bool:
        """Whether nothing can follow: the answer ends here."""
        return bool(self._after is None and self._matcher.is_stopped())


class GrammarCompiler:
    """Compiles forms for one tokenizer and keeps them. Any thread may call it.

    `cpu_seconds`: what compiling one may take; it is tried first in a process of its own.
    """

    def __init__(self, token_bytes: TokenBytes, config: ModelConfig, *, cpu_seconds: float) -> None:
        self._bytes, self._tokenizer = token_bytes, token_bytes.tokenizer
        self._vocab_size, self._eos = config.text.vocab_size, sorted(config.eos_token_ids)
        self._lock, self._cpu_seconds = threading.Lock(), cpu_seconds
        self._library: tuple[llguidance.LLTokenizer, GrammarSandbox] | None = None
        self._compiled: OrderedDict[str, tuple[llguidance.LLMatcher, float]] = OrderedDict()  # with seconds

    def begin(self, structured: Structured) -> GrammarMatcher:
        """The form of a new answer; compiles it unless the same one was asked for before.

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
        if found is None:  # without the lock: it may take seconds, and others' forms are ready
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


class GrammarMasks:
    """Next-token masks of one step, computed beside the model. Holds its thread and what it has measured.

    A form that leaves nothing but `banned` tokens has failed: its row is free, and what is drawn there is not used.
    `ends` are the tokens that end an answer, which has to reach its form first.
    """

    def __init__(self, vocab_size: int, banned: Sequence[int] = (), ends: Sequence[int] = ()) -> None:
        self._vocab_size, self._ends = vocab_size, list(ends)
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

    def begin(self, forms: Sequence[GrammarMatcher]) -> Callable[[], torch.Tensor]:
        """Start on the masks of these forms; the result waits and gives them, bool [len(forms), V], True = allowed."""
        begun = [row for row, form in enumerate(forms) if form.begun]
        job: Future[NDArray[np.int32]] = self._pool.submit(self._fill, [forms[row].matcher for row in begun])

        def wait() -> torch.Tensor:
            start = time.perf_counter()
            words_SW = torch.from_numpy(job.result())
            self.waited += time.perf_counter() - start
            bit_B = torch.arange(32, dtype=torch.int32)
            allowed_SV = torch.ones((len(forms), self._vocab_size), dtype=torch.bool)
            allowed_SV[:, self._ends] = False
            allowed_SV[begun] = ((words_SW[:, :, None] >> bit_B) & 1).flatten(1)[:, : self._vocab_size].bool()
            for row in (~(allowed_SV & self._usable).any(dim=1)).nonzero().flatten().tolist():
                forms[row].failed = "the form asked for leaves only tokens that are never drawn"
                allowed_SV[row] = True
            return allowed_SV

        return wait

    def _fill(self, matchers: Sequence[llguidance.LLMatcher]) -> NDArray[np.int32]:
        start = time.perf_counter()
        if self._executor is None:
            self._executor = llguidance.LLExecutor()
        words_SW: NDArray[np.int32] = allocate_token_bitmask(len(matchers), self._vocab_size)
        if matchers:
            fill_next_token_bitmask_par(self._executor, [(matcher, s) for s, matcher in enumerate(matchers)], words_SW)
        self.seconds += time.perf_counter() - start
        return words_SW


def _request(structured: Structured) -> str:
    """Kind and value as JSON: what a form is known by.

    Raises:
        PromptError: it is too long, or nothing that JSON can hold.
    """
    try:
        text = json.dumps([structured.kind, structured.value], allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise PromptError(f"the {structured.kind} asked for cannot be read: {error}") from error
    if len(text) > MAX_GRAMMAR_CHARS:
        raise PromptError(f"the {structured.kind} asked for has {len(text):,} characters; {MAX_GRAMMAR_CHARS:,} may be")
    return text
