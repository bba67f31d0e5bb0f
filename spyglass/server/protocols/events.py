"""What an answer says, as typed events that each protocol serialises itself, and what is counted beside it."""

from __future__ import annotations

import json
import random
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from json.encoder import encode_basestring
from typing import Any, Literal

from spyglass.engine.detokenize import TokenBytes
from spyglass.engine.request import SHUTTING_DOWN, THINK_END, RequestOutput, TokenLogprob
from spyglass.prompt.tokenizer import PromptTokenizer
from spyglass.prompt.tokens import Prompt

CUT_OFF = "the answer was ended before it was whole; the server is stopping or gave up on it"
StopReason = Literal["stop", "length", "tool_calls"]
HOLE = f"\ue000{secrets.token_hex(8)}"  # what no data has
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer, or of its reasoning."""

    text: str
    reasoning: bool = False


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its arguments follow."""

    name: str
    call_id: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the arguments of the call that is open: a piece of the JSON text of one object."""

    json: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call that is open is whole."""


Event = TextDelta | CallStart | ArgumentsDelta | CallEnd


def new_call_id(number: int) -> str:
    """An id of the call with this number in its answer."""
    return f"call_{number:02}_{''.join(random.choices(_LETTERS, k=24))}"


def merged(events: Sequence[Event]) -> list[Event]:
    """The same with neighbouring pieces of one text, or of one call's arguments, in one event."""
    found: list[Event] = []
    if len(events) < 2:
        return list(events)
    for kind, group in groupby(events, lambda event: (type(event), isinstance(event, TextDelta) and event.reasoning)):
        if kind[0] is TextDelta:
            found.append(TextDelta("".join(event.text for event in group if isinstance(event, TextDelta)), kind[1]))
        elif kind[0] is ArgumentsDelta:
            found.append(ArgumentsDelta("".join(event.json for event in group if isinstance(event, ArgumentsDelta))))
        else:
            found += group
    return found


def failure(output: RequestOutput) -> tuple[int, str] | None:
    """Why an answer is no answer, as a status and words; None if it is one."""
    if output.error is None and output.finish_reason != "abort":
        return None
    if output.error in (None, SHUTTING_DOWN):
        return 503, CUT_OFF
    return 400 if output.grammar_violation else 500, output.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Token counts of a call; answers together, the prompt once."""

    prompt: int
    image_tokens: int
    images: int
    cached: int
    completion: int
    reasoning: int

    def __add__(self, other: Counts) -> Counts:
        """The counts of two prompts together."""
        return Counts(**{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(Counts)})

    def with_completion(self, num_tokens: int) -> Counts:
        """The same while an answer is under way."""
        return replace(self, completion=num_tokens)

    def chat(self) -> dict[str, Any]:
        """As Chat Completions and Completions have it; images are an addition."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {
                "cached_tokens": self.cached,
                "image_tokens": self.image_tokens,
                "images": self.images,
            },
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }

    def responses(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {
                "cached_tokens": self.cached,
                "image_tokens": self.image_tokens,
                "images": self.images,
            },
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.completion,
        }

    def messages(self) -> dict[str, Any]:
        """As Messages has it: cached tokens are not among the input tokens."""
        return {
            "input_tokens": self.prompt - self.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
            "output_tokens": self.completion,
            "image_tokens": self.image_tokens,
            "images": self.images,
        }


class Tokens:
    """What the ids of an answer are: how many were reasoning, and how their log-probabilities are written."""

    def __init__(self, tokenizer: PromptTokenizer, *, reasoning: bool, with_logprobs: bool) -> None:
        self._tokenizer, self._bytes = tokenizer, TokenBytes(tokenizer)
        self._think_end = tokenizer.special_id(THINK_END) if reasoning else None
        self._reasoning, self.with_logprobs = reasoning, with_logprobs

    def num_reasoning(self, ids: Sequence[int]) -> int:
        """Tokens up to and including the end of reasoning; all of them if it has no end."""
        if not self._reasoning:
            return 0
        return ids.index(self._think_end) + 1 if self._think_end in ids else len(ids)

    def ends_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether the end of reasoning is among the ids."""
        return self._think_end in ids

    def count(self, prompt: Prompt, outputs: Sequence[RequestOutput]) -> Counts:
        return Counts(
            prompt=len(prompt),
            image_tokens=int((prompt.kinds_T >= 0).sum()),
            images=len(prompt.plans),
            cached=max((output.usage.cached_tokens for output in outputs), default=0),
            completion=sum(output.usage.completion_tokens for output in outputs),
            reasoning=sum(self.num_reasoning(output.token_ids) for output in outputs),
        )

    def text(self, token: int) -> str:
        """How a token is shown; half characters as U+FFFD."""
        return (self._bytes[token] or (self._tokenizer.spelling(token) or "").encode()).decode(errors="replace")

    def visible(self, ids: Sequence[int]) -> bytes:
        """What the ids show in a text: special tokens nothing."""
        return b"".join(self._bytes[token] for token in ids)

    def logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        """One token's log-probability in OpenAI's form."""
        top = [self._one(token, logprob) for token, logprob in entry.top]
        return {**self._one(entry.token_id, entry.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._bytes[token]
        return {"token": self.text(token), "logprob": max(logprob, -9999.0), "bytes": list(data)}


class EventTemplate:
    """A server-sent event that is written once but for the values that stand as `HOLE` in its data.

    Most events of a stream differ in a word; writing all of them anew takes longer than everything else here.
    """

    def __init__(self, data: Mapping[str, Any], name: str | None = None) -> None:
        self._parts = sse(data, name).decode().split(f'"{HOLE}"')

    def fill(self, text: str, number: int | None = None) -> bytes:
        """The event with a text in its first hole and a number in its second, if it has one."""
        parts = self._parts
        end = parts[1] if number is None else f"{parts[1]}{number}{parts[2]}"
        return f"{parts[0]}{encode_basestring(text)}{end}".encode("utf-8", "replace")


def sse(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event with JSON in it, which has no line breaks."""
    text = _JSON.encode(data)
    return (f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n").encode("utf-8", "replace")
