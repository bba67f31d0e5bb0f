"""Grammars compiled by `llguidance`, and a program that tries whether one can be, in a process of its own.

Some short patterns take minutes, some grammars more stack than there is, and nothing can end a thread: so a form is
tried first where it can be ended (`sandbox` starts this file and talks to it). It imports nothing of ours, since
the process is to start in tenths of a second.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import IO, Any, TypeVar

import llguidance
import numpy as np
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

_STACK = 1 << 29  # bytes for a thread that compiles; `llguidance` follows references level by level, some 20 kB each
_NICE = 5  # steps of the engine take a processor three times as often as a trial beside them
_ANY_OBJECT = {"type": "object"}
_META = re.compile(r"[\\.+*?()|\[\]{}^$]")  # what means something in a pattern
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Words:
    """A vocabulary as `llguidance` reads it: bytes of every id; `silent` ids are no way to spell text, `ends` end it.

    `encode` makes ids of text that a form leaves no choice about; without it they are those of its bytes.
    """

    tokens: Sequence[bytes]
    silent: Sequence[int]
    ends: Sequence[int]
    encode: Callable[[str], Sequence[int]] | None = None

    def vocabulary(self) -> llguidance.LLTokenizer:
        """For the library."""
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Wrapped(self)), n_vocab=len(self.tokens), eos_token=list(self.ends)
        )


class _Wrapped:
    """The names that the library looks for."""

    def __init__(self, words: Words) -> None:
        self.eos_token_id, self.bos_token_id = words.ends[0], None
        self.special_token_ids, self.tokens = list(words.silent), list(words.tokens)
        for token in self.special_token_ids:
            self.tokens[token] = b"<|%d|>" % token
        self._encode = words.encode
        self._of_byte = {word[0]: token for token, word in enumerate(self.tokens) if len(word) == 1}

    def __call__(self, text: str) -> Sequence[int]:
        if self._encode is not None:
            return self._encode(text)
        return [self._of_byte[byte] for byte in takewhile(self._of_byte.__contains__, text.encode())]


def compile_grammar(kind: str, value: Any, vocabulary: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """The form compiled, and one token taken on trial, which is where forms without measure take their time or fail.

    Raises:
        ValueError: it means nothing, or something of it would not be honoured.
    """
    try:
        grammar = _grammar(kind, value)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the {kind} asked for cannot be read: {error}") from error
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
    notes = [] if matcher.is_error() else matcher.get_grammar_warnings()
    words_1W, trial = allocate_token_bitmask(1, vocabulary.vocab_size), matcher
    if not matcher.is_error():
        fill_next_token_bitmask(matcher, words_1W)
        trial = matcher.deep_copy()
        trial.consume_token(int(np.unpackbits(words_1W.view(np.uint8), bitorder="little").argmax()))
    if trial.is_error() or notes:  # a warning is something of the form that would not be honoured
        wrong = first_line(trial.get_error()) if trial.is_error() else "; ".join(notes)
        raise ValueError(f"the {kind} asked for cannot be followed: {wrong[:500]}")
    return matcher


def first_line(error: str) -> str:
    """What the library says without its inner state."""
    return error.partition("\n")[0][:500]


def run_deep(work: Callable[[], _R], starting: threading.Lock) -> _R:
    """The result of `work`, done where the stack is deep. While it is started, all new threads get such a one."""
    with ThreadPoolExecutor(1, thread_name_prefix="compile") as pool:
        with starting:
            before = threading.stack_size(_STACK)
            done = pool.submit(work)
            threading.stack_size(before)
        return done.result()


def _grammar(kind: str, value: Any) -> str:
    """The form in the library's own notation. A choice is a pattern: as a grammar it may have no more than 2,000."""
    if kind == "json":
        return str(llguidance.grammar_from("json_schema", json.dumps(_ANY_OBJECT)))
    if kind == "json_schema":
        return str(llguidance.grammar_from("json_schema", json.dumps(value)))
    if kind == "choice":
        return str(llguidance.grammar_from("regex", "|".join(_META.sub(r"\\\g<0>", text) for text in value)))
    return str(llguidance.grammar_from("regex" if kind == "regex" else "grammar", value))


def _serve(stdin: IO[str], stdout: IO[str]) -> None:
    """Try forms: the first line is the vocabulary and the limits, each further one [kind, value].

    What goes back is what is wrong (null = nothing) and the processor time that it took.
    """

    def tell(answer: object) -> None:
        stdout.write(json.dumps(answer) + "\n")
        stdout.flush()

    tokens, silent, ends, limits = json.loads(stdin.readline())
    vocabulary = Words([word.encode("latin-1") for word in tokens], silent, ends).vocabulary()
    starting = threading.Lock()
    tell("ready")
    for line in stdin:
        _limit(*limits)
        began = time.process_time()
        kind, value = json.loads(line)
        try:
            run_deep(partial(compile_grammar, kind, value, vocabulary), starting)
            wrong = None
        except ValueError as error:
            wrong = str(error)
        _limit(0, 0)
        tell([wrong, time.process_time() - began])


def _limit(cpu_seconds: float, wall_seconds: float) -> None:
    """End the process when so much time has gone by, wherever it is then; 0 = never."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)


if __name__ == "__main__":
    os.nice(_NICE)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGALRM))
    _serve(sys.stdin, sys.stdout)
