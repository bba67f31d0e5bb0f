"""What an answer looks like in Anthropic Messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from spyglass.engine.request import Delta, RequestOutput
from spyglass.server.errors import anthropic_error
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

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesReply:
    """Events of Messages, or its whole body."""

    def __init__(self, parsed: ParsedRequest, *, model: str, family: str, tokens: Tokens) -> None:
        self._id, self._model = f"msg_{uuid.uuid4().hex}", model
        self._tokens, self._prompt, self._thinking = tokens, parsed.prompt, parsed.thinking
        self._markup = Markup(family, parsed.expected)
        self._streams = False
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] | None = None  # of the last block, while it is open
        self._template: EventTemplate | None = None  # of more of that block
        self._output: RequestOutput | None = None

    @property
    def malformed_tool_call(self) -> bool:
        """Whether the answer held markup that is no call."""
        return self._markup.malformed

    def begin(self, request_id: str) -> bytes:
        """The message as it begins; thinking has its block from the start."""
        self._streams = True
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return self._event("message_start", message=message) + self._start_thinking()

    def push(self, index: int, delta: Delta) -> bytes:
        self._output = delta.output
        if not self._streams:
            return b""
        events = self._serialise(self._markup.push(delta.text))
        if delta.output is None:
            return events
        wrong = failure(delta.output)
        if wrong is not None:
            return events + sse(anthropic_error(*wrong), "error")
        rest, reason = self._markup.finish(delta.output)
        events += self._serialise(rest) + self._close()
        return (
            events
            + self._event("message_delta", delta=self._stop(reason), usage=self._usage())
            + self._event("message_stop")
        )

    def end(self) -> bytes:
        """Nothing: the message has said that it stops."""
        return b""

    def whole(self, request_id: str) -> tuple[int, Mapping[str, Any]]:
        output = self._output
        assert output is not None
        wrong = failure(output)
        if wrong is not None:
            return wrong[0], anthropic_error(*wrong)
        self._start_thinking()
        self._serialise(self._markup.push(output.text))
        rest, reason = self._markup.finish(output)
        self._serialise(rest)
        self._close()
        return 200, {**self._head(), "content": self._blocks, **self._stop(reason), "usage": self._usage()}

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model}

    def _start_thinking(self) -> bytes:
        return self._open({"type": "thinking", "thinking": "", "signature": ""}) if self._thinking else b""

    def _serialise(self, events: Sequence[Event]) -> bytes:
        found = []
        for event in events:
            if isinstance(event, TextDelta):
                kind = "thinking" if event.reasoning else "text"
                if self._pieces is None or self._blocks[-1]["type"] != kind:
                    more = {"signature": ""} if event.reasoning else {}
                    found += [self._close(), self._open({"type": kind, kind: "", **more})]
                found.append(self._delta(kind, event.text))
            elif isinstance(event, CallStart):
                block = {"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}}
                found += [self._close(), self._open(block)]
            elif isinstance(event, CallEnd):
                found.append(self._close())
            else:
                found.append(self._delta("input_json", event.json))
        return b"".join(found)

    def _open(self, block: dict[str, Any]) -> bytes:
        self._blocks.append(block)
        self._pieces, self._template = [], None
        ping = self._event("ping") if len(self._blocks) == 1 else b""
        return self._event("content_block_start", index=len(self._blocks) - 1, content_block=dict(block)) + ping

    def _delta(self, kind: str, text: str) -> bytes:
        assert self._pieces is not None
        self._pieces.append(text)
        if not self._streams:
            return b""
        if self._template is None:
            self._template = EventTemplate(self._delta_data(kind, HOLE), "content_block_delta")
        return self._template.fill(text)

    def _delta_data(self, kind: str, text: str) -> dict[str, Any]:
        delta = {"type": f"{kind}_delta", "partial_json" if kind == "input_json" else kind: text}
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> bytes:
        """End the block that is open, if one is; the input of a call that was cut off is empty."""
        if self._pieces is None:
            return b""
        block, text, self._pieces = self._blocks[-1], "".join(self._pieces), None
        signed = b""
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(text)
            except ValueError:
                block["input"] = {}
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = self._id
            delta = {"type": "signature_delta", "signature": self._id}
            signed = self._event("content_block_delta", index=len(self._blocks) - 1, delta=delta)
        return signed + self._event("content_block_stop", index=len(self._blocks) - 1)

    def _event(self, name: str, **fields: Any) -> bytes:
        return sse({"type": name, **fields}, name) if self._streams else b""

    def _usage(self) -> dict[str, Any]:
        outputs = [] if self._output is None else [self._output]
        return {"service_tier": "standard", **self._tokens.count(self._prompt, outputs).messages()}

    def _stop(self, reason: StopReason) -> dict[str, Any]:
        """Why the message stopped; `empty` marks one that ended of itself and said nothing, to be asked for again."""
        assert self._output is not None
        stop: dict[str, Any] = {"stop_reason": _REASONS[reason], "stop_sequence": None}
        if self._output.stopped_by is not None and reason != "tool_calls":
            stop = {"stop_reason": "stop_sequence", "stop_sequence": self._output.stopped_by}
        elif reason == "stop" and not self._markup.has_content:
            stop["empty"] = True
        return stop
