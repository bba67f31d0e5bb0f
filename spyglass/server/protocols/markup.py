"""Tool calls and reasoning in the text of an answer, as typed events.

The rules. A block `<｜DSML｜tool_calls>` (V4.1: `<｜DSML｜ calls>`; also `function_calls`) counts once its first call
has begun; what it holds flows as it comes. A call without its block counts when it is closed, names a tool of the
request and has that tool's required parameters. Everything else, broken markup included, is content, also behind and
between calls. In reasoning a block counts if the answer ends with it; followed by more reasoning it was a quotation. An
answer that ends of itself while still reasoning is given as content too. Line breaks at the borders of reasoning,
content and calls are left out, but for those between two pieces of content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spyglass.engine.request import THINK_END, RequestOutput
from spyglass.server.protocols.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    Event,
    StopReason,
    TextDelta,
    merged,
    new_call_id,
)
from spyglass.server.protocols.tags import MARK, MORE, ClosedCall, Tags, overlap

_WRAPPERS = ("arguments", "input")
_BROKEN = object()
_State = Literal["reasoning", "text", "calls", "call", "value", "held", "dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What an answer may hold: `tools` by name with the schema of their parameters, `reasoning` if it starts inside
    reasoning, `in_calls` if the prompt has opened the block, `one_call` if later calls are dropped, `continues` if it
    goes on where a message of the request stops."""

    tools: Mapping[str, Any]
    reasoning: bool = False
    in_calls: bool = False
    one_call: bool = False
    continues: bool = False


class Markup:
    """Reads one answer; how it is cut into pieces does not matter.

    `num_calls` counts calls. `malformed`: markup that is no call was left as text, or text stood inside a call.
    `has_content`: there was content or a call.
    """

    def __init__(self, family: str, expected: Expected) -> None:
        self._tags, self._expected = Tags(family), expected
        self._state: _State = "reasoning" if expected.reasoning else "calls" if expected.in_calls else "text"
        self._steps: Mapping[_State, Callable[[], bool]] = {
            "reasoning": self._in_reasoning,
            "text": self._in_text,
            "calls": self._in_calls,
            "call": self._in_call,
            "value": self._in_value,
            "held": self._in_held,
            "dropped": self._in_dropped,
        }
        self._buffer = ""
        self._events: list[Event] = []
        self._reasoned: list[str] = []
        self._breaks = ""  # white space that is text only if more text follows
        self._at_start, self._after_call = not expected.continues, False
        self._in_block = expected.in_calls
        self._tool, self._parameter, self._is_text = "", "", False
        self._num_parameters, self._repeated = 0, False
        self._written: set[str] = set()  # parameters of the call that is open
        self._stray = ""  # text inside the call that is open
        self._open = False
        self.num_calls = 0
        self.malformed = self.has_content = False

    def push(self, text: str) -> list[Event]:
        """What is certain now."""
        if not self._buffer and "<" not in text and text[-1:] != "\n" and not (self._at_start or self._breaks):
            if self._state == "reasoning":
                self._reasoned.append(text)
            if self._state == "reasoning" or (self._state == "text" and not self._after_call):  # by far the most
                return [TextDelta(text, self._state == "reasoning")] if text else []
        self._buffer += text
        self._run()
        return self._take_events()

    def finish(self, output: RequestOutput) -> tuple[list[Event], StopReason]:
        """The rest, and why the answer ended. A stop string cuts, too: it may stand in the middle of a call."""
        cut = output.finish_reason != "stop" or output.stopped_by is not None
        was_open = self._open
        if self._state == "reasoning":
            self._finish_reasoning(cut)
        elif self._state in ("value", "held"):
            self._finish_value(cut)
        elif self._state == "call" and not cut:
            self._end_call()
        elif self._state == "text" or not (cut or self.num_calls):
            self.malformed |= self._buffer.startswith(MARK)
            self._text(self._take(len(self._buffer)))
        self._text(self._stray)
        if self._breaks and not self._after_call:
            self._events.append(TextDelta(self._breaks, self._state == "reasoning"))
        reason: StopReason = "tool_calls" if self.num_calls else "stop"
        if output.finish_reason != "stop" or (cut and was_open):
            reason = "length"  # a call that is not whole is never given as one to run
        return self._take_events(), reason

    def _run(self) -> None:
        """Take from the buffer while it says something; a step that returns False needs more text."""
        while self._buffer and self._steps[self._state]():
            pass

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return merged(events)

    def _text(self, text: str, *, reasoning: bool = False) -> None:
        """Text of the answer, or of its reasoning; line breaks at its end wait for what follows."""
        if self._at_start:
            text = text.lstrip("\n")
        if not text:
            return
        text, self._breaks = self._breaks + text, ""
        shown = text.rstrip() if self._after_call and not text.strip() else text.rstrip("\n")
        self._breaks = text[len(shown) :]
        if shown:
            self._events.append(TextDelta(shown, reasoning))
            self._at_start = self._after_call = False
            self.has_content |= not reasoning

    def _in_reasoning(self) -> bool:
        end = self._buffer.find(THINK_END)
        if end >= 0:
            self._reason(self._take(end))
            self._take(len(THINK_END))
            self._end_reasoning("text")
            return True
        mark = self._buffer.find(MARK) if self._expected.tools else -1
        if mark != 0:
            text = self._take_before(mark, THINK_END)
        else:
            end = self._tags.block_end(self._buffer)
            if end == MORE or (end > 0 and not self._buffer[end:].strip()):
                return False
            text = self._take(len(MARK))
        self._reason(text)
        return bool(text)

    def _reason(self, text: str) -> None:
        self._reasoned.append(text)
        self._text(text, reasoning=True)

    def _end_reasoning(self, state: _State) -> None:
        self._breaks, self._at_start, self._state = "", True, state

    def _in_text(self) -> bool:
        if not self._expected.tools:
            self._text(self._take(len(self._buffer)))
            return True
        mark = self._buffer.find(MARK)
        if mark != 0:
            text = self._take_before(mark)
            self._text(text)
            return bool(text)
        begun, closed = self._tags.begun_block(self._buffer), self._tags.closed_call(self._buffer)
        if MORE in (begun, closed):
            return False
        if begun > 0 or (isinstance(closed, ClosedCall) and self._is_sound(closed)):
            self._take(max(begun, 0))
            self._state, self._in_block = "calls", begun > 0
        else:
            self.malformed = True
            self._text(self._take(len(MARK)))
        return True

    def _is_sound(self, call: ClosedCall) -> bool:
        """Whether a call names a tool of the request and has its required parameters."""
        tools = self._expected.tools
        return call.tool in tools and call.parameters.issuperset(_names(tools[call.tool], "required"))

    def _in_calls(self) -> bool:
        place = self._after_space()
        end, tag = self._tags.end_of_block(self._buffer, place), self._tags.call.at(self._buffer, place)
        if end > 0:
            self._take(end)
            self._state = "text"
        elif isinstance(tag, re.Match):
            self._take(tag.end())
            self._begin_call(tag[1])
        elif MORE in (end, tag):
            return False
        elif self._in_block and self.num_calls:
            self.malformed = True
            self._text(self._take_stray(place))
        else:  # the prompt had opened the block and the model wrote something else, or there was no block
            self._state = "text"
        return True

    def _begin_call(self, tool: str) -> None:
        if self._expected.one_call and self.num_calls:
            self._state = "dropped"
            return
        self._tool, self._num_parameters, self._state = tool, 0, "call"
        self._written.clear()
        self._events.append(CallStart(tool, new_call_id(self.num_calls)))
        self.num_calls += 1
        self._open = self._after_call = self.has_content = True

    def _in_call(self) -> bool:
        place = self._after_space()
        if self._buffer.startswith(self._tags.end_call, place):
            self._take(place + len(self._tags.end_call))
            self._end_call()
            return True
        tag = self._tags.parameter.at(self._buffer, place)
        if isinstance(tag, re.Match):
            self._take(tag.end())
            self._parameter, self._is_text = tag[1], tag[2] == "true"
            self._num_parameters += 1
            self._repeated = self._parameter in self._written
            self._state = "value" if self._is_text and not self._is_wrapper() and not self._repeated else "held"
            if self._state == "value":
                self._begin_parameter(self._parameter, '"')
        elif tag == MORE or self._tags.end_call.startswith(self._buffer[place:]):
            return False
        else:
            self.malformed = True
            self._stray += self._take_stray(place)
        return True

    def _in_value(self) -> bool:
        end = self._buffer.find(self._tags.end_value)
        if end < 0:
            piece = self._take_before(-1, self._tags.end_value)
            self._arguments(_escaped(piece))
            return bool(piece)
        self._arguments(_escaped(self._take(end)) + '"')
        self._take(len(self._tags.end_value))
        self._state = "call"
        return True

    def _in_held(self) -> bool:
        end = self._buffer.find(self._tags.end_value)
        if end < 0:
            return False
        self._whole_parameter(self._take(end))
        self._take(len(self._tags.end_value))
        self._state = "call"
        return True

    def _in_dropped(self) -> bool:
        self.malformed |= bool(self._take(len(self._buffer)).strip())
        return True

    def _finish_reasoning(self, cut: bool) -> None:
        """A block at the very end counts; otherwise what reasoning there was is the answer, if the model ended it."""
        block = self._tags.completed(self._buffer) if self._buffer.startswith(MARK) else ""
        if self._tags.block_end(block) > 0:
            self._end_reasoning("calls")
            self._buffer, self._in_block = block[self._tags.begun_block(block) :], True
            self._run()
            return
        self._reason(self._take(len(self._buffer)))
        answer = "".join(self._reasoned)
        if not cut and answer.strip():
            self._end_reasoning("text")
            self._text(answer)

    def _finish_value(self, cut: bool) -> None:
        """A value whose closing tag has nearly come is whole; any other stays open, so that no one runs half a call."""
        rest = self._take(len(self._buffer))
        half, held = overlap(rest, self._tags.end_value), self._state == "held"
        if half <= len(MARK):
            if held and self._repeated:
                self._stray += rest
                return
            if held:
                self._begin_parameter(self._parameter, '"')
            self._arguments(_escaped(rest))
            return
        value = rest[: len(rest) - half]
        if held:
            self._whole_parameter(value)
        else:
            self._arguments(_escaped(value) + '"')
        if not cut:
            self._end_call()

    def _is_wrapper(self) -> bool:
        """Whether the only parameter so far is one that models put around the real ones, and the tool has none so
        called."""
        properties = self._properties()
        return (
            self._num_parameters == 1
            and bool(properties)
            and self._parameter in _WRAPPERS
            and self._parameter not in properties
        )

    def _properties(self) -> Sequence[str]:
        return _names(self._expected.tools.get(self._tool), "properties")

    def _whole_parameter(self, value: str) -> None:
        """A parameter that was held: unwrapped, and as text if it is not the JSON it claims to be. One that its call
        has already is text of the answer."""
        if self._repeated:
            self.malformed, self._stray = True, self._stray + value
            return
        inner = self._unwrapped(value) if self._is_wrapper() else None
        if inner is None:
            is_text = self._is_text or _parsed(value) is _BROKEN
            self._begin_parameter(self._parameter, f'"{_escaped(value)}"' if is_text else value.strip())
            return
        for name, item in inner.items():
            self._begin_parameter(name, json.dumps(item, ensure_ascii=False))

    def _unwrapped(self, value: str) -> Mapping[str, Any] | None:
        """The real parameters: an object of them, or the bare value of the only one there can be."""
        parsed, properties = _parsed(value), self._properties()
        if isinstance(parsed, dict):
            return parsed if set(parsed) <= set(properties) else None
        required = _names(self._expected.tools.get(self._tool), "required")
        only = required if len(required) == 1 else properties
        if len(only) != 1:
            return None
        return {only[0]: parsed if isinstance(parsed, str) else value}

    def _begin_parameter(self, name: str, value: str) -> None:
        """A parameter's name and the JSON text of its value, or the beginning of that."""
        self._arguments(f'{", " if self._written else "{"}"{_escaped(name)}": {value}')
        self._written.add(name)

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(ArgumentsDelta(text))

    def _end_call(self) -> None:
        self._arguments("}" if self._written else "{}")
        self._events.append(CallEnd())
        self._state, self._open = "calls", False
        stray, self._stray = self._stray, ""
        self._text(stray)

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _take_before(self, mark: int, *others: str) -> str:
        """Text before the mark at `mark`; without one (-1), all that cannot be the start of a mark."""
        if mark < 0:
            mark = len(self._buffer) - max(overlap(self._buffer, other) for other in (MARK, *others))
        return self._take(mark)

    def _after_space(self) -> int:
        return len(self._buffer) - len(self._buffer.lstrip())

    def _take_stray(self, place: int) -> str:
        """Text where only tags can be, up to the next tag there may be."""
        end = self._buffer.find("<", place + 1)
        return self._take(end if end > 0 else len(self._buffer))


def _names(schema: object, name: str) -> tuple[str, ...]:
    """Names that a JSON schema lists, whatever it really is."""
    value = schema.get(name) if isinstance(schema, Mapping) else None
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list | tuple | Mapping) else ()


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _parsed(value: str) -> Any:
    """The JSON that a text holds, `_BROKEN` if it is none."""
    try:
        return json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _BROKEN


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
