"""Reading answers: reasoning off, then every word must be the right one; a box may be off as far as eyes may be."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

ENOUGH_OVERLAP = 0.5  # intersection over union of a right box: the usual criterion for pointing at things
_BOX = re.compile(r"<｜box｜>\[\[(\d{1,3}), (\d{1,3}), (\d{1,3}), (\d{1,3})\]\]<｜/box｜>")
_CALLS = re.compile(r"<｜DSML｜(?:tool_| )calls>(.*)</｜DSML｜(?:tool_| )calls>", re.DOTALL)
_CALL = re.compile(r'<｜DSML｜ ?invoke name="([^"]+)">(.*?)</｜DSML｜ ?invoke>', re.DOTALL)
_PARAMETER = re.compile(
    r'<｜DSML｜ ?parameter name="([^"]+)" string="(true|false)">(.*?)</｜DSML｜ ?parameter>', re.DOTALL
)
_END_OF_REASONING = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was said: the words, with a mark where a box stood, and the boxes in the models' coordinates."""

    words: str
    boxes: tuple[tuple[int, int, int, int], ...]


def parse_answer(text: str) -> Answer:
    """Take an answer apart; white space around it and between its words does not count.

    A box is `<｜box｜>[[x1, y1, x2, y2]]<｜/box｜>` with whole numbers below 1,000; anything like it stays words.
    """
    said = " ".join(text.rpartition(_END_OF_REASONING)[2].split())
    boxes = tuple((int(x1), int(y1), int(x2), int(y2)) for x1, y1, x2, y2 in _BOX.findall(said))
    return Answer(words=_BOX.sub("<｜box｜>", said), boxes=boxes)


def is_right(expected: str, text: str) -> bool:
    """Whether `text` is the whole of the `expected` answer: the same words, and boxes that overlap enough."""
    said, right = parse_answer(text), parse_answer(expected)
    return (
        said.words == right.words
        and len(said.boxes) == len(right.boxes)
        and all(overlap(a, b) >= ENOUGH_OVERLAP for a, b in zip(said.boxes, right.boxes, strict=True))
    )


def may_become_right(expected: str, text: str) -> bool:
    """Whether an answer that begins with `text` can be right in the end, unless `</think>` takes its words back.

    A character or a box that is cut off may still become the right one.
    """
    text = " ".join(text.rstrip("\ufffd").split())
    before, box, rest = text.rpartition("<｜box｜>")
    said, right = parse_answer(before if box and "<｜/box｜>" not in rest else text), parse_answer(expected)
    return (
        right.words.startswith(said.words)
        and len(said.boxes) <= len(right.boxes)
        and all(overlap(a, b) >= ENOUGH_OVERLAP for a, b in zip(said.boxes, right.boxes, strict=False))
    )


def is_thought(expected: str, text: str) -> bool:
    """Whether `text` begins with the whole of the `expected` reasoning, letter for letter, and its end."""
    return text.rpartition(_END_OF_REASONING)[0] == expected


def overlap(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> float:
    """Intersection over union of two boxes (x1, y1, x2, y2); 0 where either is turned inside out or empty."""
    if min(a[2] - a[0], a[3] - a[1], b[2] - b[0], b[3] - b[1]) <= 0:
        return 0.0
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0) * max(height, 0)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def read_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """The names and arguments of an answer that calls tools and says nothing else, in either family's markup; None =
    it is no such answer, or its markup is not sound."""
    block = _CALLS.fullmatch(text.strip())
    if block is None or _CALL.sub("", block[1]).strip():
        return None
    calls = []
    for name, rest in _CALL.findall(block[1]):
        if _PARAMETER.sub("", rest).strip():
            return None
        given = {
            key: value if is_text == "true" else read_json(value) for key, is_text, value in _PARAMETER.findall(rest)
        }
        calls.append((name, given))
    return calls


def read_json(text: str) -> Any:
    """The value of a JSON text; None where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None
