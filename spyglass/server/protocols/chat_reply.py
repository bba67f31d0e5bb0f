"""What an answer looks like in Chat Completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from spyglass.engine.request import Delta, RequestOutput, TokenLogprob
from spyglass.server.errors import openai_error
from spyglass.server.protocols.conversation import ParsedRequest
from spyglass.server.protocols.events import (
    HOLE,
    ArgumentsDelta,
    CallStart,
    Event,
    EventTemplate,
    TextDelta,
    Tokens,
    failure,
    merged,
    sse,
)
from spyglass.server.protocols.markup import Markup


class ChatReply:
    """Chunks of Chat Completions, or its whole body."""

    def __init__(
        self,
        parsed: ParsedRequest,
        num_answers: int,
        *,
        model: str,
        family: str,
        tokens: Tokens,
        include_usage: bool,
        usage_in_each: bool,
    ) -> None:
        self._id, self._created, self._model = f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), model
        self._tokens, self._prompt = tokens, parsed.prompt
        self._include_usage, self._usage_in_each = include_usage, usage_in_each
        self._markups = [Markup(family, parsed.expected) for _ in range(num_answers)]
        self._thinking, self._in_reasoning = parsed.thinking, [parsed.expected.reasoning] * num_answers
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(num_answers)]
        self._num_tokens, self._num_calls = [0] * num_answers, [0] * num_answers
        self._outputs: dict[int, RequestOutput] = {}
        self._templates: dict[tuple[int, bool], EventTemplate] = {}  # of text, by answer and kind
        self._streams = False

    @property
    def malformed_tool_call(self) -> bool:
        """Whether an answer held markup that is no call."""
        return any(markup.malformed for markup in self._markups)

    def begin(self, request_id: str) -> bytes:
        self._streams = True
        delta = {"role": "assistant", **self._delta("", reasoning=True)}
        return b"".join(self._chunk(index, delta) for index in range(len(self._markups)))

    def push(self, index: int, delta: Delta) -> bytes:
        if delta.output is not None:
            self._outputs[index] = delta.output
        if not self._streams:
            return b""
        markup = self._markups[index]
        self._logprobs[index] += delta.logprobs or ()
        self._num_tokens[index] += len(delta.token_ids)
        chunks = self._chunks(index, markup.push(delta.text))
        if delta.output is None:
            return chunks
        wrong = failure(delta.output)
        if wrong is not None:
            return chunks + sse(openai_error(*wrong))
        events, reason = markup.finish(delta.output)
        last = self._delta("", reasoning=False)
        return chunks + self._chunks(index, events) + self._chunk(index, last, reason)

    def end(self) -> bytes:
        """Usage, if it was asked for, and the end of the stream."""
        usage = b""
        if self._include_usage:
            counts = self._tokens.count(self._prompt, list(self._outputs.values()))
            usage = sse({**self._head("chat.completion.chunk"), "choices": [], "usage": counts.chat()})
        return usage + b"data: [DONE]\n\n"

    def whole(self, request_id: str) -> tuple[int, Mapping[str, Any]]:
        outputs = [self._outputs[index] for index in range(len(self._markups))]
        wrong = next(filter(None, map(failure, outputs)), None)
        if wrong is not None:
            return wrong[0], openai_error(*wrong)
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        counts = self._tokens.count(self._prompt, outputs)
        return 200, {**self._head("chat.completion"), "choices": choices, "usage": counts.chat()}

    def _choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        markup = self._markups[index]
        events = markup.push(output.text)
        rest, reason = markup.finish(output)
        texts: dict[bool, list[str]] = {False: [], True: []}
        calls: list[dict[str, Any]] = []
        for event in merged([*events, *rest]):
            if isinstance(event, TextDelta):
                texts[event.reasoning].append(event.text)
            elif isinstance(event, CallStart):
                calls.append(_call_head(len(calls), event))
            elif isinstance(event, ArgumentsDelta):
                calls[-1]["function"]["arguments"] += event.json
        message = {"role": "assistant", "content": "".join(texts[False])}
        if self._thinking:
            message["reasoning_content"] = "".join(texts[True])
        return {
            "index": index,
            "message": {**message, "tool_calls": calls} if calls else message,
            "logprobs": self._take_logprobs(index, output.logprobs),
            "finish_reason": reason,
            **self._mark(index, reason),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunks(self, index: int, events: Sequence[Event]) -> bytes:
        chunks = []
        for event in events:
            if isinstance(event, TextDelta):
                chunks.append(self._text_chunk(index, event))
            elif isinstance(event, CallStart):
                self._num_calls[index] += 1
                chunks.append(self._chunk(index, {"tool_calls": [_call_head(self._num_calls[index] - 1, event)]}))
            elif isinstance(event, ArgumentsDelta):
                more = {"index": self._num_calls[index] - 1, "function": {"arguments": event.json}}
                chunks.append(self._chunk(index, {"tool_calls": [more]}))
        return b"".join(chunks)

    def _text_chunk(self, index: int, event: TextDelta) -> bytes:
        if self._logprobs[index] or self._usage_in_each:
            return self._chunk(index, self._delta(event.text, reasoning=event.reasoning))
        template = self._templates.get((index, event.reasoning))
        if template is None:
            data = self._chunk_data(index, self._delta(HOLE, reasoning=event.reasoning))
            template = self._templates[index, event.reasoning] = EventTemplate(data)
        return template.fill(event.text)

    def _delta(self, text: str, *, reasoning: bool) -> dict[str, str | None]:
        if not self._thinking:
            return {"content": text}
        return {"content": None if reasoning else text, "reasoning_content": text if reasoning else None}

    def _chunk(self, index: int, delta: Mapping[str, Any], reason: str | None = None) -> bytes:
        return sse(self._chunk_data(index, delta, reason))

    def _chunk_data(self, index: int, delta: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        entries, self._logprobs[index] = self._logprobs[index], []
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._take_logprobs(index, entries or None),
            "finish_reason": reason,
            **({} if reason is None else self._mark(index, reason)),
        }
        chunk = {**self._head("chat.completion.chunk"), "system_fingerprint": None, "choices": [choice]}
        if self._usage_in_each:
            chunk["usage"] = self._tokens.count(self._prompt, ()).with_completion(sum(self._num_tokens)).chat()
        elif self._include_usage:
            chunk["usage"] = None
        return chunk

    def _mark(self, index: int, reason: str) -> dict[str, Any]:
        """By what a client can tell an answer that ended of itself and said nothing, to ask again."""
        return {"empty": True} if reason == "stop" and not self._markups[index].has_content else {}

    def _take_logprobs(self, index: int, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        """Reasoning apart from content, as the makers' service does."""
        if entries is None or not self._tokens.with_logprobs:
            return None
        ids = [entry.token_id for entry in entries]
        border = self._tokens.num_reasoning(ids) if self._in_reasoning[index] else 0
        self._in_reasoning[index] = self._in_reasoning[index] and not self._tokens.ends_reasoning(ids)
        given = [self._tokens.logprob(entry) for entry in entries]
        return {"content": given[border:], "reasoning_content": given[:border]} if border else {"content": given}


def _call_head(index: int, call: CallStart) -> dict[str, Any]:
    function = {"name": call.name, "arguments": ""}
    return {"index": index, "id": call.call_id, "type": "function", "function": function}
