"""Markup of any shape, cut anywhere: each character that a model wrote ends up once in content, reasoning or a call."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from tests.server.protocol_parts import (
    FAMILIES,
    LOOSE,
    PATH,
    PROTOCOLS,
    ChatProtocol,
    Family,
    call_of,
    cut,
    output,
    said_stream,
    said_whole,
    stream_of,
    whole_of,
)

TOOLS = {"look": PATH, "run": LOOSE, "now": {"type": "object", "properties": {}}}
FIRST = 0x4E00  # the characters whose way is followed: each is written once, and no tag has any of them


def tag(family: Family, name: str, attributes: str = "", *, end: bool = False) -> str:
    space = " " if family == "deepseek_v41" else ""
    name = "calls" if family == "deepseek_v41" and name == "tool_calls" else name
    return f"<{'/' if end else ''}｜DSML｜{space}{name}{attributes}>"


def pieces(rng: random.Random, family: Family, thinking: bool) -> list[str]:
    """An answer in pieces; `*` stands for a character to follow."""
    found = ["*", "</think>", "\n\n"] if thinking else []
    found += rng.choice([[], ["*", " *", "\n\n"], ["* ", "\n"]])
    for _ in range(rng.randint(0, 2)):
        block = rng.choice(["tool_calls", "tool_calls", "function_calls", ""])
        found += [tag(family, block), "\n"] if block else []
        for _ in range(rng.randint(1, 2)):
            found += [tag(family, "invoke", f' name="{rng.choice(["look", "run", "now"])}"'), "\n"]
            for _ in range(rng.randint(0, 2)):
                name, text = rng.choice(["path", "n", "arguments", "command"]), rng.random() < 0.6
                value = (
                    rng.choice(["*", "**", " a* "]) if text else rng.choice(['"*"', '["*", 1]', '{"path": "*"}', "*"])
                )
                head = f' name="{name}" string="{"true" if text else "false"}"'
                found += [tag(family, "parameter", head), value, tag(family, "parameter", end=True), "\n"]
            found += [tag(family, "invoke", end=True), "\n"]
        found += [tag(family, block, end=True)] if block else []
        found += rng.choice([[], [" Done*."], ["\n\n*"]])
    return found


def mutated(rng: random.Random, parts: list[str]) -> list[str]:
    """The same with pieces lost, doubled, moved, shortened or put in."""
    for _ in range(rng.choice([0, 0, 1, 2, 3])):
        place = rng.randrange(len(parts)) if parts else 0
        deed = rng.choice(["lose", "double", "move", "shorten", "insert"])
        if deed == "insert" or not parts:
            parts.insert(place, rng.choice(["*", " ", "<", "</", "｜DSML｜", "<*>", "</think>", "\n"]))
        elif deed == "lose":
            parts.pop(place)
        elif deed == "double":
            parts.insert(place, parts[place])
        elif deed == "move":
            parts.insert(rng.randrange(len(parts)), parts.pop(place))
        else:
            parts[place] = parts[place][: rng.randrange(len(parts[place]) + 1)]
    return parts


def text_of(rng: random.Random, family: Family, thinking: bool) -> str:
    """An answer whose characters to follow differ."""
    told = "".join(mutated(rng, pieces(rng, family, thinking))).split("*")
    return told[0] + "".join(chr(FIRST + number) + part for number, part in enumerate(told[1:]))


def followed(text: str) -> Counter[str]:
    return Counter(character for character in text if FIRST <= ord(character) < FIRST + 1000)


def check(seed: int, protocol: ChatProtocol, family: Family) -> None:
    rng = random.Random(f"{seed} {protocol} {family}")
    thinking = rng.random() < 0.5
    text = text_of(rng, family, thinking)
    text = text[: rng.randint(0, len(text))] if rng.random() < 0.7 else text
    finished = output(text, reason=rng.choice(["stop", "length"]))
    options: dict[str, Any] = {"tools": TOOLS, "thinking": thinking}
    events = stream_of(
        call_of(protocol, family, stream=True, **options), cut(text, rng.randint(1, 9)) or [""], finished
    )
    whole = said_whole(protocol, whole_of(call_of(protocol, family, **options), finished))
    for said in (said_stream(protocol, events), whole):
        reasoning, content = followed(said.reasoning), followed(said.content)
        if thinking and finished.finish_reason == "stop" and said.reasoning.strip("\n") == said.content.strip("\n"):
            content.clear()  # reasoning that never ended is the answer, too
        calls = followed("".join(arguments for _, arguments in said.calls))
        if protocol == "messages" and said is whole and "{}" in (arguments for _, arguments in said.calls):
            calls |= followed(text) - reasoning - content  # unfinished arguments are left out of a whole message
        assert reasoning + content + calls == followed(text), (seed, json.dumps(text, ensure_ascii=False), said)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_character_of_an_answer_ends_up_exactly_once(protocol: ChatProtocol, family: Family) -> None:
    for seed in range(60):
        check(seed, protocol, family)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_character_of_many_answers_ends_up_exactly_once(protocol: ChatProtocol, family: Family) -> None:
    for seed in range(1000, 1300):
        check(seed, protocol, family)
