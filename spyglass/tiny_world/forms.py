"""Questions that are answered in a form: JSON by a schema, and calls of tools. Values are words of the world."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from numpy.random import Generator

from spyglass.tiny_world.scene import Thing
from spyglass.tiny_world.words import COLOURS, POSITIONS, SHAPES

_T = TypeVar("_T")
PLACES = tuple(place.split(" ", 2)[2] for row in POSITIONS for place in row)  # "top left" ... "bottom right"
KEYS = {
    "colour": ("colour", "color", "answer"),
    "shape": ("shape", "form", "answer"),
    "count": ("count", "number", "answer"),
    "position": ("position", "place", "answer"),
    "number": ("number", "value", "answer"),
    "word": ("word", "text", "answer"),
}
IN_FORMS = tuple(KEYS)  # kinds of questions that have a value
_ENUMS: dict[str, tuple[str, ...]] = {"colour": tuple(COLOURS), "shape": SHAPES, "position": PLACES}
_VERBS = ("report", "save", "set", "tell", "record")
_ABOUT = {
    "colour": "the colour of a thing",
    "shape": "the shape of a thing",
    "count": "how many things there are",
    "position": "where a thing is",
    "number": "the number in the picture",
    "word": "the word in the picture",
}
_OTHERS = (
    ("get_weather", "Get the weather of a city.", "city"),
    ("send_mail", "Send a mail.", "text"),
    ("search", "Search the web.", "query"),
    ("play_music", "Play a song.", "title"),
)
MOST_THINGS = 4  # of a list of things in JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A JSON schema and the one value of it that is right."""

    schema: dict[str, Any]
    value: dict[str, Any]


def value_of(kind: str, choice: str) -> str | int:
    """The value behind a question's answer; `choice` as in `cases.Words`."""
    if kind == "position":
        row, column = json.loads(choice.replace("(", "[").replace(")", "]"))
        return PLACES[3 * row + column]
    return int(choice) if kind in ("count", "number") else choice


def form_of(kind: str, choice: str, rng: Generator) -> Form:
    """A form with one field for the answer of a question of a kind in `IN_FORMS`."""
    key = _one(KEYS[kind], rng)
    return Form(schema=_object({key: _field(kind, rng)}, rng), value={key: value_of(kind, choice)})


def form_of_things(things: Sequence[Thing], rng: Generator) -> Form:
    """All things of a picture: fields of the only one, a list in the order of colours and shapes, or their count."""
    order = {(colour, shape): place for place, (colour, shape) in enumerate((c, s) for c in COLOURS for s in SHAPES)}
    pairs = sorted(((thing.colour, thing.shape) for thing in things), key=lambda pair: order[pair])
    fields = {"colour": _field("colour", rng), "shape": _field("shape", rng)}
    if len(pairs) == 1 and rng.random() < 0.7:
        names = ("colour", "shape") if rng.random() < 0.5 else ("shape", "colour")
        told = dict(zip(("colour", "shape"), pairs[0], strict=True))
        return Form(schema=_object({n: fields[n] for n in names}, rng), value={n: told[n] for n in names})
    counted = Counter(pairs)
    if len(counted) > MOST_THINGS:
        return Form(schema=_object({"count": {"type": "integer"}}, rng), value={"count": len(pairs)})
    fields = {"count": {"type": "integer"}, **fields}
    listed = [{"count": count, "colour": pair[0], "shape": pair[1]} for pair, count in counted.items()]
    schema = {"things": {"type": "array", "items": _object(fields, rng)}}
    return Form(schema=_object(schema, rng), value={"things": listed})


def tool_of(kind: str, choice: str, rng: Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tool that takes the answer of a question, and the call of it, both in OpenAI form."""
    form = form_of(kind, choice, rng)
    verb = _one(_VERBS, rng)
    (key,) = form.value
    name = f"{verb}_{kind}" if key != "answer" else f"{verb}_answer"
    about = _ABOUT[kind] if key != "answer" else "an answer"
    tool = _tool(name, f"{verb.capitalize()} {about}.", form.schema)
    function = {"name": name, "arguments": json.dumps(form.value)}
    return tool, {"id": "call_0", "type": "function", "function": function}


def other_tool(rng: Generator) -> dict[str, Any]:
    """A tool that has nothing to do with pictures."""
    name, about, key = _one(_OTHERS, rng)
    return _tool(name, about, {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]})


def _tool(name: str, about: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


def _field(kind: str, rng: Generator) -> dict[str, Any]:
    if kind in ("count", "number"):
        return {"type": "integer"}
    listed = kind in _ENUMS and rng.random() < 0.5
    return {"type": "string", "enum": list(_ENUMS[kind])} if listed else {"type": "string"}


def _object(fields: dict[str, Any], rng: Generator) -> dict[str, Any]:
    """An object with these fields, in one of the spellings that people and libraries give it."""
    plain = {"type": "object", "properties": fields, "required": list(fields)}
    look = int(rng.integers(4))
    if look == 0:
        return {**plain, "additionalProperties": False}
    if look == 1:  # as Pydantic writes it
        titled = {name: {"title": name.capitalize(), **field} for name, field in fields.items()}
        return {"properties": titled, "required": list(fields), "title": "Answer", "type": "object"}
    return plain


def _one(items: Sequence[_T], rng: Generator) -> _T:
    return items[int(rng.integers(len(items)))]
