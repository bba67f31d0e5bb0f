"""Tool calls and reasoning in the text of an answer, decided before the library turns them into events.

The library commits to a call at the first `<｜DSML｜`, whatever follows, and takes both families' spellings for both.
Here a call is one only when its structure is there. What is recognised is respelled with a mark that no answer can
contain, and only that is parsed by the library; everything else, broken markup included, stays text.

The rules. A block `<｜DSML｜tool_calls>` (V4.1: `<｜DSML｜ calls>`) counts once its first call has begun; what it holds
flows as it comes. A call without its block counts when it is closed, names a tool of the request and has that tool's
required parameters. In reasoning a block counts if the answer ends with it; followed by more reasoning it was a
quotation. An answer that ends of itself while still reasoning is given as content too.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spyglass.server.tags import MARK, MORE, ClosedCall, Tags, overlap

THINK_END = "</think>"
_WRAPPERS = ("arguments", "input")
_BROKEN = object()
_State = Literal["reasoning", "text", "calls", "call", "value", "held", "done"]


@dataclass(frozen=True, slots=True)
class Spelling:
    """How recognised markup is spelled for the library."""

    dsml: str
    think_end: str


def make_spelling() -> Spelling:
    """A spelling that no model can know: a private character and a random number."""
    mark = f"\ue000{secrets.token_hex(8)}"
    return Spelling(f"{mark}D", f"{mark}T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What an answer may hold: `tools` by name with the schema of their parameters, `reasoning` if it starts inside
    reasoning, `in_calls` if the prompt has opened the block, `one_call` if later calls are dropped."""

    tools: Mapping[str, Any]
    reasoning: bool = False
    in_calls: bool = False
    one_call: bool = False


class Markup:
    """Reads one answer; how it is cut into pieces does not matter.

    `num_calls` counts calls. `odd`: markup that is no call was left as text, or text among calls was dropped.
    """

    def __init__(self, family: str, expected: Expected, spelling: Spelling) -> None:
        self._tags = Tags(family)
        self._expected, self._spelling = expected, spelling
        self._state: _State = "text"
        if expected.reasoning:
            self._state = "reasoning"
        elif expected.in_calls:
            self._state = "calls"
        self._steps: Mapping[_State, Callable[[], str | None]] = {
            "reasoning": self._in_reasoning,
            "text": self._in_text,
            "calls": self._in_calls,
            "call": self._in_call,
            "value": self._in_value,
            "held": self._in_held,
            "done": self._in_done,
        }
        self._buffer = ""
        self._reasoned: list[str] = []
        self._tool, self._parameter, self._is_text = "", "", False
        self._num_parameters = 0
        self.num_calls = 0
        self.odd = False

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._state in ("call", "value", "held")

    def push(self, text: str) -> str:
        """What is certain now, for the library."""
        self._buffer += text
        return "".join(self._run())

    def finish(self, *, cut: bool) -> str:
        """The rest. `cut`: the answer was ended from outside, so what it left open stays open."""
        if self._state == "reasoning":
            return self._finish_reasoning(cut)
        rest, self._buffer = self._buffer, ""
        if self._state in ("value", "held"):
            return self._finish_value(rest, cut)
        if cut and (self._state == "call" or (self._state == "calls" and not self.num_calls)):
            return ""
        if self._state in ("call", "calls") and self.num_calls:
            return ("" if self._state == "calls" else self._end_call()) + self._end_block()
        self.odd |= rest.startswith(MARK)
        return rest

    def _run(self) -> Iterator[str]:
        """Take from the buffer while it says something; a step that returns None needs more text."""
        while self._buffer:
            piece = self._steps[self._state]()
            if piece is None:
                return
            yield piece

    def _in_reasoning(self) -> str | None:
        end = self._buffer.find(THINK_END)
        if end >= 0:
            reasoned = self._take(end)
            self._take(len(THINK_END))
            self._state = "text"
            return reasoned + self._spelling.think_end
        mark = self._buffer.find(MARK) if self._expected.tools else -1
        if mark != 0:
            text = self._take_before(mark, THINK_END)
        else:
            end = self._tags.block_end(self._buffer)
            if end == MORE or (end > 0 and not self._buffer[end:].strip()):
                return None
            text = self._take(len(MARK))
        if text:
            self._reasoned.append(text)
        return text

    def _in_text(self) -> str | None:
        mark = self._buffer.find(MARK) if self._expected.tools else -1
        if mark != 0:
            return self._take_before(mark) if self._expected.tools else self._take(len(self._buffer))
        begun, closed = self._tags.begun_block(self._buffer), self._tags.closed_call(self._buffer)
        if MORE in (begun, closed):
            return None
        if begun > 0 or (isinstance(closed, ClosedCall) and self._is_sound(closed)):
            self._take(max(begun, 0))
            self._state = "calls"
            return ""
        self.odd = True
        return self._take(len(MARK))

    def _is_sound(self, call: ClosedCall) -> bool:
        """Whether a call names a tool of the request and has its required parameters."""
        tools = self._expected.tools
        return call.tool in tools and call.parameters.issuperset(_listed(tools[call.tool], "required"))

    def _in_calls(self) -> str | None:
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(self._tags.end_block):
            self._take(len(self._tags.end_block))
            self._state = "done"
            return self._end_block()
        tag = self._tags.call.at(self._buffer)
        if isinstance(tag, re.Match):
            return self._begin_call(tag)
        if tag == MORE or self._tags.end_block.startswith(self._buffer):
            return None
        if self.num_calls == 0:  # the prompt had opened the block, the model wrote something else
            self._state = "text"
            return ""
        return self._drop()

    def _begin_call(self, tag: re.Match[str]) -> str:
        if self._expected.one_call and self.num_calls:
            self._state = "done"
            return self._end_block()
        self._take(tag.end())
        self._tool, self._num_parameters, self._state = tag[1], 0, "call"
        self.num_calls += 1
        dsml = self._spelling.dsml
        block = f"<{dsml}tool_calls>\n" if self.num_calls == 1 else ""
        return f'{block}<{dsml}invoke name="{self._tool}">\n'

    def _in_call(self) -> str | None:
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(self._tags.end_call):
            self._take(len(self._tags.end_call))
            self._state = "calls"
            return self._end_call()
        tag = self._tags.parameter.at(self._buffer)
        if isinstance(tag, re.Match):
            self._take(tag.end())
            self._parameter, self._is_text = tag[1], tag[2] == "true"
            self._num_parameters += 1
            self._state = "value" if self._is_text and not self._is_wrapper() else "held"
            return self._begin_parameter(self._parameter, "true") if self._state == "value" else ""
        if tag == MORE or self._tags.end_call.startswith(self._buffer):
            return None
        return self._drop()

    def _in_value(self) -> str | None:
        end = self._buffer.find(self._tags.end_value)
        if end < 0:
            return self._take_before(-1, self._tags.end_value)
        value = self._take(end)
        self._take(len(self._tags.end_value))
        self._state = "call"
        return value + self._end_parameter()

    def _in_held(self) -> str | None:
        end = self._buffer.find(self._tags.end_value)
        if end < 0:
            return None
        value = self._take(end)
        self._take(len(self._tags.end_value))
        self._state = "call"
        return self._whole_parameter(value)

    def _in_done(self) -> str:
        self.odd |= bool(self._buffer.strip())
        self._buffer = ""
        return ""

    def _finish_reasoning(self, cut: bool) -> str:
        """A block at the very end counts; otherwise what reasoning there was is the answer, if the model ended it."""
        block = self._buffer
        if block.startswith(MARK):
            block = block.rstrip().removesuffix(self._tags.end_block)
            block = block[: len(block) - overlap(block, self._tags.end_block)] + self._tags.end_block
        if self._tags.block_end(block) > 0:
            self._buffer, self._state = block.removeprefix(self._tags.block), "calls"
            return "".join(self._run())
        rest, self._buffer = self._buffer, ""
        answer = "".join((*self._reasoned, rest))
        return rest if cut or not answer.strip() else f"{rest}{self._spelling.think_end}{answer}"

    def _finish_value(self, rest: str, cut: bool) -> str:
        """A value whose closing tag has nearly come is whole; any other stays open, so that no one runs half a call."""
        half = overlap(rest, self._tags.end_value)
        begun = self._begin_parameter(self._parameter, "true") if self._state == "held" else ""
        if half <= len(MARK):
            return begun + rest
        value = rest[: len(rest) - half]
        whole = self._whole_parameter(value) if self._state == "held" else value + self._end_parameter()
        return whole if cut else whole + self._end_call() + self._end_block()

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
        return _listed(self._expected.tools.get(self._tool), "properties")

    def _whole_parameter(self, value: str) -> str:
        """A parameter that was held: unwrapped, and as text if it is not the JSON it claims to be."""
        if self._is_wrapper():
            inner = self._unwrapped(value)
            if inner is not None:
                return "".join(
                    self._spell(name, item if isinstance(item, str) else json.dumps(item), isinstance(item, str))
                    for name, item in inner.items()
                )
        return self._spell(self._parameter, value, self._is_text or _parsed(value) is _BROKEN)

    def _unwrapped(self, value: str) -> Mapping[str, Any] | None:
        """The real parameters: an object of them, or the bare value of the only one there can be."""
        parsed, properties = _parsed(value), self._properties()
        if isinstance(parsed, dict):
            return parsed if set(parsed) <= set(properties) else None
        required = _listed(self._expected.tools.get(self._tool), "required")
        only = required if len(required) == 1 else properties
        if len(only) != 1:
            return None
        return {only[0]: parsed if isinstance(parsed, str) else value}

    def _spell(self, name: str, value: str, is_text: bool) -> str:
        return self._begin_parameter(name, "true" if is_text else "false") + value + self._end_parameter()

    def _begin_parameter(self, name: str, is_text: str) -> str:
        return (
            f'<{self._spelling.dsml}parameter name="{json.dumps(name, ensure_ascii=False)[1:-1]}" string="{is_text}">'
        )

    def _end_parameter(self) -> str:
        return f"</{self._spelling.dsml}parameter>\n"

    def _end_call(self) -> str:
        return f"</{self._spelling.dsml}invoke>\n"

    def _end_block(self) -> str:
        return f"</{self._spelling.dsml}tool_calls>"

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _take_before(self, mark: int, *others: str) -> str | None:
        """Text before the mark at `mark`; without one (-1), all that cannot be the start of a mark."""
        if mark < 0:
            mark = len(self._buffer) - max(overlap(self._buffer, other) for other in (MARK, *others))
        return self._take(mark) or None

    def _drop(self) -> str:
        """Leave out text where only tags can be."""
        self.odd = True
        place = self._buffer.find("<", 1)
        self._take(place if place > 0 else len(self._buffer))
        return ""


def _listed(schema: object, name: str) -> tuple[str, ...]:
    """Names that a JSON schema lists, whatever it really is."""
    value = schema.get(name) if isinstance(schema, Mapping) else None
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list | tuple | Mapping) else ()


def _parsed(value: str) -> Any:
    """The JSON a text spells, `_BROKEN` if it is none."""
    try:
        return json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _BROKEN


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
