"""What an answer looks like in Responses: items of the output, each opened, filled and closed by events."""

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
    CallEnd,
    CallStart,
    Event,
    EventTemplate,
    StopReason,
    TextDelta,
    Tokens,
    failure,
    sse,
)
from spyglass.server.protocols.markup import Markup


class ResponsesReply:
    """Events of Responses, or its whole body."""

    def __init__(
        self, parsed: ParsedRequest, given: Mapping[str, Any], *, model: str, family: str, tokens: Tokens
    ) -> None:
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._tokens, self._prompt = tokens, parsed.prompt
        self._markup = Markup(family, parsed.expected)
        self._settings = _settings(given, model)
        self._streams, self._number = False, 0
        self._items: list[dict[str, Any]] = []
        self._pieces: list[str] | None = None  # of the last item, while it is open
        self._template: EventTemplate | None = None  # of more text of the item that is open
        self._waiting: list[TokenLogprob] = []
        self._item_logprobs: list[dict[str, Any]] = []
        self._in_reasoning = parsed.expected.reasoning
        self._output: RequestOutput | None = None

    @property
    def malformed_tool_call(self) -> bool:
        """Whether the answer held markup that is no call."""
        return self._markup.malformed

    def begin(self, request_id: str) -> bytes:
        self._streams = True
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def push(self, index: int, delta: Delta) -> bytes:
        self._output = delta.output
        if not self._streams:
            return b""
        self._waiting += delta.logprobs or ()
        events = self._serialise(self._markup.push(delta.text))
        if delta.output is None:
            return events
        wrong = failure(delta.output)
        if wrong is not None:
            error = {"code": "server_error" if wrong[0] >= 500 else "invalid_prompt", "message": wrong[1]}
            return events + self._event("response.failed", response={**self._response("failed"), "error": error})
        rest, reason = self._markup.finish(delta.output)
        events += self._serialise(rest) + self._close(cut=reason == "length")
        response = self._ended(reason)
        return events + self._event(f"response.{response['status']}", response=response)

    def end(self) -> bytes:
        """Nothing: the response itself says that it is complete."""
        return b""

    def whole(self, request_id: str) -> tuple[int, Mapping[str, Any]]:
        output = self._output
        assert output is not None
        wrong = failure(output)
        if wrong is not None:
            return wrong[0], openai_error(*wrong)
        self._waiting = list(output.logprobs or ())
        self._serialise(self._markup.push(output.text))
        rest, reason = self._markup.finish(output)
        self._serialise(rest)
        self._close(cut=reason == "length")
        return 200, self._ended(reason)

    def _serialise(self, events: Sequence[Event]) -> bytes:
        found = []
        for event in events:
            if isinstance(event, TextDelta):
                kind = "reasoning" if event.reasoning else "message"
                if self._pieces is None or self._items[-1]["type"] != kind:
                    found += [self._close(), self._open_text(kind)]
                found.append(self._text(event))
            elif isinstance(event, CallStart):
                found += [self._close(before_call=True), self._open_call(event)]
            elif isinstance(event, CallEnd):
                found.append(self._close())
            else:
                self._pieces.append(event.json)  # type: ignore[union-attr]  # a call is open
                found.append(self._event("response.function_call_arguments.delta", delta=event.json, **self._place()))
        return b"".join(found)

    def _open_text(self, kind: str) -> bytes:
        number = len(self._items)
        if kind == "reasoning":
            item = {
                "type": kind,
                "id": f"rs_{self._id}_{number}",
                "status": "in_progress",
                "content": [],
                "summary": [],
            }
            item["encrypted_content"] = f"{self._id}-{number}"
        else:
            item = {"type": kind, "id": f"msg_{self._id}_{number}", "status": "in_progress", "role": "assistant"}
            item |= {"phase": "final_answer", "content": []}
        added = self._add(item)
        return added + self._event("response.content_part.added", part=self._part_of(""), **self._place(0))

    def _open_call(self, call: CallStart) -> bytes:
        namespace, _, name = call.name.rpartition("::")
        item = {"type": "function_call", "id": f"fc_{self._id}_{len(self._items)}", "status": "in_progress"}
        item |= {
            "call_id": call.call_id,
            "name": name,
            "arguments": "",
            **({"namespace": namespace} if namespace else {}),
        }
        return self._add(item)

    def _add(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        self._pieces, self._item_logprobs, self._template = [], [], None
        return self._event("response.output_item.added", item=dict(item), output_index=len(self._items) - 1)

    def _text(self, event: TextDelta) -> bytes:
        assert self._pieces is not None
        self._pieces.append(event.text)
        if self._waiting and not event.reasoning:
            entries = self._take_logprobs()
            return self._event("response.output_text.delta", delta=event.text, logprobs=entries, **self._place(0))
        if not self._streams:
            return b""
        if self._template is None:
            name = f"response.{'reasoning' if event.reasoning else 'output'}_text.delta"
            more: dict[str, Any] = {} if event.reasoning else {"logprobs": []}
            data = {"type": name, "delta": HOLE, **more, **self._place(0), "sequence_number": HOLE}
            self._template = EventTemplate(data, name)
        self._number += 1
        return self._template.fill(event.text, self._number - 1)

    def _close(self, *, cut: bool = False, before_call: bool = False) -> bytes:
        """End the item that is open, if one is. `cut`: the answer was ended from outside."""
        if self._pieces is None:
            return b""
        item, text, self._pieces = self._items[-1], "".join(self._pieces), None
        item["status"] = "incomplete" if cut else "completed"
        if item["type"] == "function_call":
            item["arguments"] = text
            done = self._event("response.function_call_arguments.done", arguments=text, **self._place())
        else:
            part = self._part_of(text)
            item["content"] = [part]
            name = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            more = {} if item["type"] == "reasoning" else {"logprobs": self._item_logprobs}
            if before_call and item["type"] == "message":
                item["phase"] = "commentary"
            done = self._event(f"response.{name}.done", text=text, **more, **self._place(0))
            done += self._event("response.content_part.done", part=part, **self._place(0))
        return done + self._event("response.output_item.done", item=item, output_index=len(self._items) - 1)

    def _part_of(self, text: str) -> dict[str, Any]:
        if self._items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "annotations": [], "logprobs": list(self._item_logprobs), "text": text}

    def _place(self, part: int | None = None) -> dict[str, Any]:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place if part is None else {**place, "content_index": part}

    def _event(self, name: str, **fields: Any) -> bytes:
        self._number += 1
        return sse({"type": name, **fields, "sequence_number": self._number - 1}, name) if self._streams else b""

    def _response(self, status: str) -> dict[str, Any]:
        head = {"id": self._id, "object": "response", "created_at": self._created, "status": status}
        return {**head, **self._settings, "output": self._items if status != "in_progress" else []}

    def _ended(self, reason: StopReason) -> dict[str, Any]:
        assert self._output is not None
        usage = self._tokens.count(self._prompt, [self._output]).responses()
        response = {**self._response("completed"), "completed_at": int(time.time()), "usage": usage}
        if reason == "length":
            response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        elif not self._markup.has_content:  # by this a client can tell to ask again
            response["empty"] = True
        return response

    def _take_logprobs(self) -> list[dict[str, Any]]:
        """Log-probabilities of content; reasoning has no place for them in this protocol."""
        entries, self._waiting = self._waiting, []
        if not self._tokens.with_logprobs:
            return []
        ids = [entry.token_id for entry in entries]
        border = self._tokens.num_reasoning(ids) if self._in_reasoning else 0
        self._in_reasoning = self._in_reasoning and not self._tokens.ends_reasoning(ids)
        found = [self._tokens.logprob(entry) for entry in entries[border:]]
        self._item_logprobs += found
        return found


def _settings(given: Mapping[str, Any], model: str) -> dict[str, Any]:
    """What a response says of its request."""
    reasoning, text = given.get("reasoning", {}), given.get("text", {})
    text_format = {name: value for name, value in (text.get("format") or {"type": "text"}).items() if value is not None}
    tools = [
        {"description": None, "strict": None, **tool} for tool in given.get("tools", ()) if isinstance(tool, Mapping)
    ]
    return {
        "background": False, "completed_at": None, "content_filters": None, "error": None, "incomplete_details": None,
        "frequency_penalty": given.get("frequency_penalty", 0.0), "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"), "max_tool_calls": None, "model": model,
        "moderation": None, "output": [], "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "presence_penalty": given.get("presence_penalty", 0.0), "previous_response_id": None,
        "prompt_cache_key": None, "prompt_cache_retention": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None}, "safety_identifier": None,
        "service_tier": "default", "store": False, "temperature": given.get("temperature", 1.0),
        "text": {"format": text_format, "verbosity": None}, "tool_choice": given.get("tool_choice", "auto"),
        "tools": tools, "top_logprobs": given.get("top_logprobs", 0), "top_p": given.get("top_p", 1.0),
        "truncation": "disabled", "usage": None, "user": None, "metadata": {},
    }  # fmt: skip
