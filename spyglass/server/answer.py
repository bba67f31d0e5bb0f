"""One answer on its way into a protocol's events: text through `Markup` into the library's stream processor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import deepseek_recipe

from spyglass.engine.detokenize import TokenBytes
from spyglass.engine.request import RequestOutput, TokenLogprob
from spyglass.prompt.tokenizer import PromptTokenizer
from spyglass.prompt.tokens import Prompt
from spyglass.server.conversation import Conversed
from spyglass.server.markup import THINK_END, Markup, make_spelling

CUT_OFF = "the answer was ended before it was whole; the server is stopping or gave up on it"
_REASONS = {
    "stop": deepseek_recipe.InferenceFinishReason.Stop,
    "length": deepseek_recipe.InferenceFinishReason.Length,
}


class Answer:
    """Events of one answer. `make_generator` is the library's, for the protocol, with this answer's id."""

    def __init__(self, make_generator: Callable[[], Any], conversed: Conversed, family: str) -> None:
        spelling = make_spelling()
        self.markup = Markup(family, conversed.expected, spelling)
        options = deepseek_recipe.ParsingOptions(
            parse_tool_calls=bool(conversed.expected.tools),
            thinking_initial_stage=conversed.stage,
            special_tokens=deepseek_recipe.SpecialTokens(dsml=spelling.dsml, thinking_end=spelling.think_end),
        )
        self._processor = deepseek_recipe.StreamProcessor(make_generator(), options)
        self._num_prompt = len(conversed.prompt)

    def begin(self) -> list[Any]:
        """Events before the first text."""
        usage = deepseek_recipe.PromptUsage(prompt_tokens=self._num_prompt)
        return self._processor.push(deepseek_recipe.InferenceChunk.ready(prompt_usage=usage))

    def push(self, text: str) -> list[Any]:
        """Events of what is certain after `text`."""
        certain = self.markup.push(text)
        return self._processor.push(deepseek_recipe.InferenceChunk.text(certain)) if certain else []

    def finish(self, output: RequestOutput) -> list[Any]:
        """The rest, and the events of the end. A stop string cuts, too: it may stand in the middle of a call."""
        reason = output.finish_reason
        cut = reason != "stop" or output.stopped_by is not None
        if cut and self.markup.in_call:
            reason = "length"  # the library would take it for a whole call
        rest = self.markup.finish(cut=cut)
        events = self._processor.push(deepseek_recipe.InferenceChunk.text(rest)) if rest else []
        events += self._processor.push(deepseek_recipe.InferenceChunk.finish(_REASONS[reason]))
        return events + self._processor.finish()

    def all_events(self, output: RequestOutput) -> list[Any]:
        """Everything at once, for a call that does not stream."""
        return [*self.begin(), *self.push(output.text), *self.finish(output)]


def failure(output: RequestOutput) -> tuple[int, str] | None:
    """Why an answer is no answer, as a status and words; None if it is one."""
    if output.error is None and output.finish_reason != "abort":
        return None
    return 400 if output.grammar_violation else 500, output.error or CUT_OFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Token counts of a call; answers together, the prompt once."""

    prompt: int
    picture: int
    pictures: int
    cached: int
    completion: int
    reasoning: int

    def __add__(self, other: Counts) -> Counts:
        """The counts of two prompts together."""
        return Counts(**{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(Counts)})

    def chat(self) -> dict[str, Any]:
        """As Chat Completions and Completions tell it; pictures are an addition."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {
                "cached_tokens": self.cached,
                "image_tokens": self.picture,
                "images": self.pictures,
            },
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }

    def responses(self) -> dict[str, Any]:
        """As Responses tells it."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {
                "cached_tokens": self.cached,
                "image_tokens": self.picture,
                "images": self.pictures,
            },
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.completion,
        }

    def messages(self) -> dict[str, Any]:
        """As Messages tells it: cached tokens are not among the input tokens."""
        return {
            "input_tokens": self.prompt - self.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
            "output_tokens": self.completion,
            "image_tokens": self.picture,
            "images": self.pictures,
        }


class Tokens:
    """What the ids of an answer are: how many were reasoning, and how their log-probabilities are told."""

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
        """Counts of the answers to one prompt."""
        return Counts(
            prompt=len(prompt),
            picture=int((prompt.kinds_T >= 0).sum()),
            pictures=len(prompt.plans),
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


def event(name: str | None, data: str) -> bytes:
    """One server-sent event; `data` is JSON, which has no line breaks."""
    return (f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n").encode()


def spell(value: Mapping[str, Any]) -> str:
    """JSON as the library writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
