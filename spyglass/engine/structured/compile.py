"""Grammars compiled by `llguidance`, and a program that tries whether one can be, in a process of its own.

Some short patterns take minutes, some grammars more stack than there is, and nothing can end a thread: so a grammar is
tried first where it can be ended, in a process of its own that is forked from one with the vocabulary (`sandbox` starts
this file and talks to it). It imports nothing of ours, since that one is to start in tenths of a second.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

import llguidance
import numpy as np
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

_STACK = 1 << 29  # bytes for a thread that compiles; `llguidance` follows references level by level, some 20 kB each
_MEMORY = 768 << 20  # bytes for one grammar; what takes long to compile takes memory, some hundred MB a second
MAX_GRAMMAR_CHARS = 1 << 18  # of a grammar: what one level of references takes of the stack, its text bounds
MAX_REPEATS = 4096  # of one pattern: n optional things one behind another take n * n, 0.2 s of a processor for so many
# Parts of patterns that may be read in all, a fifth of the library's own bound: 200,000 take it 0.07 s to count. A
# choice of 9,000 words has fewer than 100,000.
_LIMITS = llguidance.LLParserLimits(initial_lexer_fuel=200_000)
_NICE = 2  # than the engine; what takes long gives way more (`wait_giving_way`)
_ANY_OBJECT = {"type": "object"}
# White space between the tokens of JSON: none, one blank, or a line break with indentation; else an answer may be
# blanks to its limit. `oneOf` is read as `anyOf`.
JSON_OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,40}", "coerce_one_of": True}
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames", "additionalItems")
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")
_DEFINITIONS = ("$defs", "definitions")
_DEFINITION = re.compile(r"#/(\$defs|definitions)/[^/~%]+")
_SAME_VALUE = frozenset(
    {"anyOf", "oneOf", "allOf", "not", "if", "then", "else", "dependentSchemas"}
)  # schemas of the same value
_OF_OBJECTS = _SAME_VALUE | {  # what speaks of the properties of an object
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames", "required"),
    *("minProperties", "dependentRequired", "dependencies", "$ref", "const", "enum"),
}
_META = re.compile(r"[\\.+*?()|\[\]{}^$]")  # what means something in a pattern
# Behind what is none: an escape, a class of characters, a kind of group; brackets and bars, which part alternatives.
_REPEAT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?|([?*+]|\{[\d,]*\})\??|([()|])", re.DOTALL)
_HEAD = struct.Struct("<Q")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Words:
    """A vocabulary as `llguidance` reads it: bytes of every id; `silent` ids are no way to spell text, `ends` end it.

    `encode` makes ids of text that a grammar leaves no choice about; without it they are those of its bytes.
    """

    tokens: Sequence[bytes]
    silent: Sequence[int]
    ends: Sequence[int]
    encode: Callable[[str], Sequence[int]] | None = None

    def vocabulary(self) -> llguidance.LLTokenizer:
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
    """The grammar compiled, and one token taken on trial, where grammars without bound take their time or fail.

    Raises:
        ValueError: it means nothing, or something of it would not be honoured.
    """
    try:
        grammar = _grammar(kind, value)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the {kind} asked for cannot be read: {error}") from error
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
    notes = [] if matcher.is_error() else [n for n in matcher.get_grammar_warnings() if not n.startswith("oneOf")]
    words_1W, trial = allocate_token_bitmask(1, vocabulary.vocab_size), matcher
    if not matcher.is_error():
        fill_next_token_bitmask(matcher, words_1W)
        trial = matcher.deep_copy()
        trial.consume_token(int(np.unpackbits(words_1W.view(np.uint8), bitorder="little").argmax()))
    if trial.is_error() or notes:  # a warning is something of the grammar that would not be honoured
        wrong = first_line(trial.get_error()) if trial.is_error() else "; ".join(notes)
        wrong = next((words for said, words in _IN_WORDS.items() if wrong.startswith(said)), wrong)
        if kind == "json_schema":
            wrong = f"{_faulty_place(value, vocabulary)}: {wrong}"
        raise ValueError(f"the {kind} asked for cannot be followed: {wrong[:500]}")
    return matcher


# What the library says with names of its own, by how it begins.
_IN_WORDS = {
    "NoExtensionBias": "it says nothing but that it is like itself, so no value fits; say what it is made of",
    "initial lexer configuration": "it has too many parts; make it smaller: counts (a{0,9}) in place of copies",
}


def first_line(error: str) -> str:
    """What the library says without its inner state, in one line."""
    return " ".join(error.partition("\n<")[0].split())[:500]


def followable(schema: Any) -> Any:
    """A JSON schema as the library follows it: with `JSON_OPTIONS`, formats that it does not know left out as notes.

    An object that lists its properties has no others, unless it says so (`additionalProperties`) or another part of
    the schema speaks of the same object: a model with nothing to say would invent properties to its limit.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    asked = schema.get("x-guidance")
    compact = isinstance(asked, dict) and asked.get("whitespace_flexible") is False
    options = {"whitespace_flexible": False, "coerce_one_of": True} if compact else JSON_OPTIONS
    return {**_followed(schema, _Shared(schema), joined=False), "x-guidance": options}


class _Shared:
    """The references of a schema that name an object of which something else speaks too."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._joined: list[str] = []  # references
        self._same: dict[str, list[str]] = {}  # by reference: those that its schema passes its value on to
        self._visit(root, "#", joined=False)
        self.references: set[str] = set()
        while self._joined:
            reference = self._joined.pop()
            if reference not in self.references:
                self.references.add(reference)
                self._joined += self._same.get(reference, [])
        # what is named by another way than a definition's name could be anything
        self.everything = not all(_DEFINITION.fullmatch(reference) for reference in self.references)

    def _visit(self, schema: Any, owner: str | None, *, joined: bool) -> None:
        if not isinstance(schema, dict):
            return
        reference = schema.get("$ref")
        if isinstance(reference, str) and (joined or set(schema) & _OF_OBJECTS - {"$ref"}):
            self._joined.append(reference)
        elif isinstance(reference, str) and owner is not None:
            self._same.setdefault(owner, []).append(reference)
        for keys, inner in _inner_schemas(schema):
            same = owner if keys[0] in _SAME_VALUE else None
            if schema is self._root and keys[0] in _DEFINITIONS:
                same = f"#/{keys[0]}/{keys[1]}"
            self._visit(inner, same, joined=_is_joined(schema, keys[0], joined=joined))


def _is_joined(schema: dict[str, Any], key: str, *, joined: bool) -> bool:
    """Whether a schema below `key` is not the only one that speaks of its value."""
    if key in ("anyOf", "oneOf"):
        return joined or bool(set(schema) & _OF_OBJECTS - {key})
    return key in _SAME_VALUE


def _followed(schema: Any, shared: _Shared, *, joined: bool, top: bool = True) -> Any:
    if not isinstance(schema, dict):
        return schema
    known = {name: value for name, value in schema.items() if name != "format" or not _is_unknown_format(value)}
    for place, inner in _inner_schemas(schema):
        container = known
        for key in place[:-1]:
            if container[key] is schema[key]:
                container[key] = container[key].copy()
            container = container[key]
        among = _is_joined(schema, place[0], joined=joined)
        if top and place[0] in _DEFINITIONS:
            among = f"#/{place[0]}/{place[1]}" in shared.references
        container[place[-1]] = _followed(inner, shared, joined=among, top=False)
    if not joined and not shared.everything and _lists_all(known):
        known["additionalProperties"] = False
    return known


def _lists_all(schema: dict[str, Any]) -> bool:
    """Whether an object may have the listed properties alone, as far as its own schema says."""
    listed, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, dict) or not listed or set(schema) & _OF_OBJECTS - {"properties", "required"}:
        return False
    return isinstance(required, list) and all(isinstance(name, str) and name in listed for name in required)


def _is_unknown_format(value: object) -> bool:
    return isinstance(value, str) and value not in FORMATS


def _inner_schemas(schema: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The schemas right inside a schema, by the keys that lead to them."""
    for name in _BY_NAME:
        if isinstance(schema.get(name), dict):
            yield from (((name, key), inner) for key, inner in schema[name].items())
    yield from (((name,), schema[name]) for name in _ONE if isinstance(schema.get(name), dict))
    for name in _SEVERAL:
        if isinstance(schema.get(name), list):
            yield from (((name, number), inner) for number, inner in enumerate(schema[name]))


def _faulty_place(schema: Any, vocabulary: llguidance.LLTokenizer) -> str:
    """Where in a schema that cannot be followed the error is, as deep as can be said."""
    place, root = "$", schema if isinstance(schema, dict) else {}
    while isinstance(schema, dict):
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        for keys, inner in _inner_schemas(schema):
            alone = {**shared, **inner} if isinstance(inner, dict) and keys[0] not in shared else inner
            grammar = llguidance.grammar_from("json_schema", json.dumps(followable(alone)))
            if llguidance.LLMatcher(vocabulary, grammar, log_level=0).is_error():
                place += "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
                schema = inner
                break
        else:
            break
    return place


def repeats(pattern: str) -> int:
    """How many parts of a regular expression may be left out or repeated, of its alternatives the one with most: what
    they cost is the square of those that follow one another."""
    most = count = depth = 0
    for found in _REPEAT.finditer(pattern):
        depth += (found[0].startswith("(")) - (found[0] == ")")
        count = 0 if found[0] == "|" and depth <= 0 else count + (found[1] is not None)
        most = max(most, count)
    return most


def patterns_of(schema: Any) -> Iterator[str]:
    """The regular expressions in a JSON schema."""
    level = [schema]
    while level:
        inner = level.pop()
        if isinstance(inner, dict):
            pattern, named = inner.get("pattern"), inner.get("patternProperties")
            yield from [pattern] if isinstance(pattern, str) else ()
            yield from named if isinstance(named, dict) else ()
            level += inner.values()
        elif isinstance(inner, list):
            level += inner


def run_deep(work: Callable[[], _R], starting: threading.Lock) -> _R:
    """The result of `work`, done where the stack is deep. While it is started, all new threads get such a one."""
    with ThreadPoolExecutor(1, thread_name_prefix="compile") as pool:
        with starting:
            before = threading.stack_size(_STACK)
            done = pool.submit(work)
            threading.stack_size(before)
        return done.result()


def _grammar(kind: str, value: Any) -> str:
    """The grammar in the library's own notation. A choice is a pattern: as a grammar it may have no more than 2,000."""
    if kind == "json":
        value = _ANY_OBJECT
    if kind in ("json", "json_schema"):
        return str(llguidance.grammar_from("json_schema", json.dumps(followable(value))))
    if kind == "choice":
        return str(llguidance.grammar_from("regex", "|".join(_META.sub(r"\\\g<0>", text) for text in value)))
    return str(llguidance.grammar_from("regex" if kind == "regex" else "grammar", value))


def send(channel: socket.socket, payload: bytes, *fds: int) -> None:
    """One message, with open files."""
    socket.send_fds(channel, [_HEAD.pack(len(payload))], fds) if fds else channel.sendall(_HEAD.pack(len(payload)))
    channel.sendall(payload)


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """One message.

    Raises:
        EOFError: the other side is gone.
    """
    head, fds, _, _ = socket.recv_fds(channel, _HEAD.size, 1)
    payload = bytearray()
    while len(head) < _HEAD.size or len(payload) < _HEAD.unpack(head)[0]:
        most = _HEAD.size - len(head) or _HEAD.unpack(head)[0] - len(payload)
        piece = channel.recv(most)
        if not piece:
            raise EOFError
        if len(head) < _HEAD.size:
            head += piece
        else:
            payload += piece
    return bytes(payload), fds


def _serve(control: socket.socket) -> None:
    """Try grammars, each in a process forked from this one: the first message is the vocabulary and the limits. Then
    for each open file that comes a process answers what comes from there, and its number is told; for each number it is
    told how that process ended."""
    tokens, silent, ends, limits = json.loads(receive(control)[0])
    vocabulary = Words([word.encode("latin-1") for word in tokens], silent, ends).vocabulary()
    gc.freeze()
    send(control, b"ready")
    while True:
        payload, fds = receive(control)
        if not fds:
            _, status = os.waitpid(int(payload), 0)
            send(control, str(os.waitstatus_to_exitcode(status)).encode())
            continue
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            control.close()
            _try(socket.socket(fileno=fds[0]), vocabulary, limits)
            os._exit(0)
        os.close(fds[0])
        send(control, str(pid).encode())


def _try(channel: socket.socket, vocabulary: llguidance.LLTokenizer, limits: Sequence[float]) -> None:
    """Try one grammar, [kind, value]: what goes back is what is wrong (null = nothing) and its processor time."""
    request = receive(channel)[0]
    _limit_memory()
    _limit(*limits)
    began = time.process_time()
    kind, value = json.loads(request)
    try:
        run_deep(partial(compile_grammar, kind, value, vocabulary), threading.Lock())
        wrong = None
    except ValueError as error:
        wrong = str(error)
    _limit(0, 0)
    send(channel, json.dumps([wrong, time.process_time() - began]).encode())


def _limit_memory() -> None:
    """A grammar may take so much memory, which unlike time is the same on any machine."""
    if sys.platform != "linux":
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    may, most = now + _STACK + _MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (may if most == resource.RLIM_INFINITY else min(may, most), most))


def _limit(cpu_seconds: float, wall_seconds: float) -> None:
    """End the process when so much time has gone by, wherever it is then; 0 = never."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)


if __name__ == "__main__":
    os.nice(_NICE)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGALRM))
    with suppress(EOFError, ConnectionError):
        _serve(socket.socket(fileno=int(sys.argv[1])))
