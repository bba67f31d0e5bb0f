"""What an answer looks like in Ollama's protocol: lines of JSON, or the last of them alone."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from spyglass.engine.request import Delta, RequestOutput
from spyglass.server.exchange import StreamForm
from spyglass.server.protocols.conversation import ParsedRequest
from spyglass.server.protocols.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    Event,
    TextDelta,
    Tokens,
    failure,
    merged,
)
from spyglass.server.protocols.markup import Markup

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def line(data: Mapping[str, Any]) -> bytes:
    """One line of a stream."""
    return (_JSON.encode(data) + "\n").encode("utf-8", "replace")


# A blank before a line is nothing to a reader of JSON, and a sign of life to a proxy.
LINES = StreamForm(media_type="application/x-ndjson", alive=b" ", error=line)


def head(model: str) -> dict[str, Any]:
    """What every line begins with."""
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {"model": model, "created_at": now}


class OllamaReply:
    """Lines of a chat or of `generate`, or the whole body. A call that was cut off is left out."""

    def __init__(self, parsed: ParsedRequest, *, model: str, family: str, tokens: Tokens, is_chat: bool) -> None:
        self._model, self._tokens, self._prompt, self._is_chat = model, tokens, parsed.prompt, is_chat
        self._markup = Markup(family, parsed.expected)
        self._output: RequestOutput | None = None
        self._streams = False
        self._began, self._first = time.monotonic(), 0.0
        self._call: tuple[CallStart, list[str]] | None = None
        self._num_calls = 0

    @property
    def malformed_tool_call(self) -> bool:
        """Whether the answer held markup that is no call."""
        return self._markup.malformed

    def begin(self, request_id: str) -> bytes:
        """Nothing before the first token."""
        self._streams = True
        return b""

    def push(self, index: int, delta: Delta) -> bytes:
        self._first = self._first or time.monotonic()
        if delta.output is not None:
            self._output = delta.output
        if not self._streams:
            return b""
        lines = self._lines(self._markup.push(delta.text))
        if delta.output is None:
            return lines
        wrong = failure(delta.output)
        if wrong is not None:
            return lines + line({"error": wrong[1]})
        events, reason = self._markup.finish(delta.output)
        return lines + self._lines(events) + line(self._last(delta.output, {"content": ""}, reason))

    def end(self) -> bytes:
        """The last line has been sent."""
        return b""

    def whole(self, request_id: str) -> tuple[int, Mapping[str, Any]]:
        output = self._output
        assert output is not None
        if (wrong := failure(output)) is not None:
            return wrong[0], {"error": wrong[1]}
        events = self._markup.push(output.text)
        rest, reason = self._markup.finish(output)
        said: dict[str, Any] = {"content": ""}
        for part in self._parts([*events, *rest]):
            for name, value in part.items():
                said[name] = said[name] + value if name in said else value
        return 200, self._last(output, said, reason)

    def _parts(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """What events add to a message: content, thinking or calls that are whole."""
        parts: list[dict[str, Any]] = []
        for event in merged(events):
            if isinstance(event, TextDelta):
                parts.append({"content": "", "thinking": event.text} if event.reasoning else {"content": event.text})
            elif isinstance(event, CallStart):
                self._call = event, []
            elif isinstance(event, ArgumentsDelta):
                assert self._call is not None
                self._call[1].append(event.json)
            elif isinstance(event, CallEnd):
                assert self._call is not None
                start, arguments = self._call
                function = {"index": self._num_calls, "name": start.name, "arguments": json.loads("".join(arguments))}
                parts.append({"content": "", "tool_calls": [{"id": start.call_id, "function": function}]})
                self._num_calls += 1
        return parts

    def _lines(self, events: Sequence[Event]) -> bytes:
        return b"".join(line({**head(self._model), **self._said(part), "done": False}) for part in self._parts(events))

    def _said(self, part: Mapping[str, Any]) -> dict[str, Any]:
        if self._is_chat:
            return {"message": {"role": "assistant", **part}}
        return {("response" if name == "content" else name): value for name, value in part.items()}

    def _last(self, output: RequestOutput, part: Mapping[str, Any], reason: str) -> dict[str, Any]:
        """The line that ends an answer, with its counts and times (nanoseconds)."""
        now, counts = time.monotonic(), self._tokens.count(self._prompt, (output,))
        times = {"total_duration": now - self._began, "load_duration": 0.0}
        read, drawn = self._first - self._began, now - self._first
        return {
            **head(self._model),
            **self._said(part),
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            **{name: round(seconds * 1e9) for name, seconds in times.items()},
            "prompt_eval_count": counts.prompt,
            "prompt_eval_duration": round(read * 1e9),
            "eval_count": counts.completion,
            "eval_duration": round(drawn * 1e9),
        }
