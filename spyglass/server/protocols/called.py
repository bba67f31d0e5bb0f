"""Calls that a model made earlier in a conversation, as OpenAI's protocols have them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spyglass.errors import json_kind
from spyglass.server.protocols.fields import FieldReader, Fields, refuse, text_field

_FUNCTION = Fields(read=frozenset({"name", "arguments"}))
CALL = Fields(
    read=frozenset({"id", "type", "index", "function"}),
    ignored=frozenset({"cache_control"}),
    inner={"function": _FUNCTION},
)


def arguments_text(given: Mapping[str, Any], where: str) -> str:
    """The arguments of a call as JSON; missing ones and an object are what they obviously mean.

    Raises:
        RequestError: they are something else.
    """
    arguments = given.get("arguments", "{}")
    if isinstance(arguments, Mapping):
        return json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        refuse(f"{where}.arguments", f"must be a string with JSON, not {json_kind(arguments)}")
    return arguments


def called(call: object, where: str, reader: FieldReader) -> dict[str, Any]:
    """A call of the history; arguments that are null or an object are what they obviously mean."""
    given = reader.read(call, CALL, where)
    function = reader.read(given.get("function"), _FUNCTION, f"{where}.function")
    arguments = arguments_text(function, f"{where}.function")
    name = text_field(function, "name", f"{where}.function")
    return {
        "id": text_field({"id": where, **given}, "id", where),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def answered_call(given: Mapping[str, Any], where: str, before: Sequence[Mapping[str, Any]]) -> str:
    """The call that a tool's message answers: the one it names, else the first of the last calls without an answer."""
    if "tool_call_id" in given:
        return text_field(given, "tool_call_id", where)
    answered = set[str]()
    for message in reversed(before):
        if message["role"] == "tool":
            answered.add(message["tool_call_id"])
            continue
        for call in message.get("tool_calls", ()):
            if call["id"] not in answered:
                return str(call["id"])
        break
    refuse(f"{where}.tool_call_id", "is missing, and there is no call before it that has no answer")
