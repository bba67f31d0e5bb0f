"""Answers in a form: JSON by schema, a regular expression, a choice, a grammar; compiled and followed by `llguidance`.

A form allows a set of next tokens. The sets of one step are computed while the model runs, in a thread of their own,
and cut the logits before a token is drawn. Compiling happens where a request is checked, never in the step loop.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import llguidance
import numpy as np
import torch
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from spyglass.config.model import ModelConfig
from spyglass.engine.detokenize import TokenBytes
from spyglass.engine.finite import has_finite_value
from spyglass.engine.request import Structured
from spyglass.errors import PromptError

_KEPT = 256  # compiled forms, a few kB to a few MB each
_LARGEST = 1 << 18  # characters of a form: what one level of references takes of the stack, its text bounds
_STACK = 1 << 29  # bytes for a thread that compiles; `llguidance` follows references level by level, some 20 kB each
_ANY_OBJECT = {"type": "object"}
_META = re.compile(r"[\\.+*?()|\[\]{}^$]")  # what means something in a pattern


class Form:
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
        """What `Masks` asks for the next token's mask."""
        return self._matcher

    def push(self, token: int) -> str | None:
        """Take one drawn token; what went wrong, or None."""
        if self._after is not None:
            if token == self._after:
                self._after = None
            return None
        if self.failed is None and not self._matcher.consume_token(token):
            self.failed = f"the answer cannot go on in the form asked for: {_first_line(self._matcher.get_error())}"
        return self.failed

    @property
    def complete(self) -> bool:
        """Whether nothing can follow: the answer ends here."""
        return bool(self._after is None and self._matcher.is_stopped())


class Forms:
    """Compiles forms for one tokenizer and keeps them. Any thread may call it."""

    def __init__(self, token_bytes: TokenBytes, config: ModelConfig) -> None:
        self._bytes, self._tokenizer = token_bytes, token_bytes.tokenizer
        self._vocab_size, self._eos = config.text.vocab_size, sorted(config.eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def begin(self, structured: Structured) -> Form:
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
        grammar = _grammar(structured)
        with self._lock:
            vocabulary, matcher = self._read_vocabulary(), self._compiled.get(grammar)
        if matcher is None:  # without the lock: it may take seconds, and others' forms are ready
            if len(grammar) > _LARGEST:
                raise PromptError(f"the {structured.kind} asked for has {len(grammar)} characters; {_LARGEST} may be")
            matcher = self._compile_deep(partial(_compile, grammar, structured.kind, vocabulary, self._vocab_size))
            if structured.kind == "json_schema" and not has_finite_value(structured.value):
                raise PromptError("the json_schema asked for has no value that ends: what it requires refers to itself")
        with self._lock:
            matcher = self._compiled.setdefault(grammar, matcher)
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return Form(matcher.deep_copy(), after)

    def _compile_deep(self, compiling: Callable[[], llguidance.LLMatcher]) -> llguidance.LLMatcher:
        """Run it where the stack is deep: an overflow in the library would be the end of the process."""
        with ThreadPoolExecutor(1, thread_name_prefix="compile") as pool:
            with self._lock:  # the size is that of all threads started now
                before = threading.stack_size(_STACK)
                compiled = pool.submit(compiling)
                threading.stack_size(before)
            return compiled.result()

    def _read_vocabulary(self) -> llguidance.LLTokenizer:
        if self._vocabulary is None:
            if not self._eos:
                raise PromptError("structured answers need a token that ends an answer; config.json names none")
            words = _Words(self._bytes, self._vocab_size, self._eos[0])
            self._vocabulary = llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(words), n_vocab=self._vocab_size, eos_token=self._eos
            )
        return self._vocabulary


class Masks:
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

    def begin(self, forms: Sequence[Form]) -> Callable[[], torch.Tensor]:
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


class _Words:
    """The vocabulary as `llguidance` reads it: bytes of every id. Added tokens are no way to spell text."""

    def __init__(self, token_bytes: TokenBytes, vocab_size: int, eos: int) -> None:
        self.eos_token_id, self.bos_token_id = eos, None
        self._tokenizer = tokenizer = token_bytes.tokenizer
        added = tokenizer.added_ids
        silent = [token for token in range(vocab_size) if token in added or not token_bytes[token]]
        self.special_token_ids = silent
        self.tokens = [token_bytes[token] for token in range(vocab_size)]
        for token in silent:
            self.tokens[token] = b"<|%d|>" % token

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode_text(text)


def _compile(grammar: str, kind: str, vocabulary: llguidance.LLTokenizer, vocab_size: int) -> llguidance.LLMatcher:
    """Compiled, and one token taken on trial, which is where forms without measure take their time or fail."""
    wrong, notes = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, vocabulary)
    if wrong or notes:  # a warning is something of the form that would not be honoured
        raise PromptError(f"the {kind} asked for cannot be followed: {'; '.join(notes)[:500]}")
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
    words_SW, trial = allocate_token_bitmask(1, vocab_size), matcher
    if not matcher.is_error():
        fill_next_token_bitmask(matcher, words_SW)
        trial = matcher.deep_copy()
        trial.consume_token(int(np.unpackbits(words_SW.view(np.uint8), bitorder="little").argmax()))
    if trial.is_error():
        raise PromptError(f"the {kind} asked for cannot be followed: {_first_line(trial.get_error())}")
    return matcher


def _first_line(error: str) -> str:
    """Without the library's inner state."""
    return error.partition("\n")[0][:500]


def _grammar(structured: Structured) -> str:
    """The form in the library's own notation. A choice is a pattern: as a grammar it may have no more than 2,000."""
    kind, value = structured.kind, structured.value
    try:
        if kind == "json":
            return llguidance.grammar_from("json_schema", json.dumps(_ANY_OBJECT))
        if kind == "json_schema":
            return llguidance.grammar_from("json_schema", json.dumps(value))
        if kind == "choice":
            return llguidance.grammar_from("regex", "|".join(_META.sub(r"\\\g<0>", text) for text in value))
        return llguidance.grammar_from(kind, value)
    except (ValueError, TypeError, RecursionError) as error:
        raise PromptError(f"the {kind} asked for cannot be read: {error}") from error
