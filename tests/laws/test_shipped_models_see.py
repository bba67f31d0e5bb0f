"""The models that come with the package answer stored questions about stored pictures, every one, letter for letter:
the whole of what they say, thoughts and boxes included.

Packed weights, greedy, on the CPU and on a GPU: whatever breaks seeing (a kernel, a cache, a quantiser, a layout)
breaks this.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from spyglass.config.shipped import shipped_models
from spyglass.engine.llm import LLM
from spyglass.tiny_world.cases import THINKING_KINDS
from spyglass.tiny_world.evaluate import ask_all
from spyglass.tiny_world.questions import IMAGE_LEFT_OUT, KINDS
from spyglass.tiny_world.words import UNSEEN

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "data" / "seeing"
QUESTIONS: list[dict[str, Any]] = json.loads((FOLDER / "questions.json").read_text(encoding="utf-8"))


def messages(question: dict[str, Any]) -> list[dict[str, Any]]:
    first, *rest = question["turns"]
    shown = [{"type": "image_url", "image_url": {"url": FOLDER / name}} for name in question["pictures"]]
    later = [{"role": ("assistant", "user")[number % 2], "content": text} for number, text in enumerate(rest)]
    return [{"role": "user", "content": [*shown, {"type": "text", "text": first}]}, *later]


def whole(question: dict[str, Any]) -> str:
    """What is said from the first letter to the last."""
    thought, answer = question["reasoning"], question["answer"]
    return str(answer) if thought is None else f"{thought}</think>{answer}"


@pytest.fixture(scope="module", params=shipped_models() or [None])
def name(request: pytest.FixtureRequest) -> str:
    if request.param is None:
        pytest.skip("no model comes with this checkout: there is no folder spyglass/models")
    found: str = request.param
    return found


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def llm(name: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    yield LLM(name, device=request.param)


@pytest.mark.slow
def test_every_stored_question_is_answered_letter_for_letter(llm: LLM) -> None:
    chats = [messages(question) for question in QUESTIONS]
    said = ask_all(llm, chats, [question["reasoning"] is not None for question in QUESTIONS])
    assert said == [whole(question) for question in QUESTIONS]


@pytest.mark.slow
def test_the_demo_is_answered_right(llm: LLM) -> None:
    picture = {"type": "image_url", "image_url": {"url": FOLDER.parents[3] / "examples" / "shapes.jpg"}}
    asked = {"type": "text", "text": "What shape is the red thing?"}
    assert ask_all(llm, [[{"role": "user", "content": [picture, asked]}]], [False]) == ["It is a triangle."]


def test_the_stored_questions_are_of_every_kind_and_of_forty_small_pictures() -> None:
    kinds = Counter(question["kind"] for question in QUESTIONS)
    assert set(kinds) == set(KINDS) - set(IMAGE_LEFT_OUT) and min(kinds.values()) >= 2
    named = [name for question in QUESTIONS for name in question["pictures"]]
    files = sorted(path.name for path in FOLDER.glob("*.jpg"))
    assert sorted(named) == files and len(files) == 40
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 400_000
    sides = [max(Image.open(FOLDER / name).size) for name in files]
    assert min(sides) < 100 and max(sides) > 1000
    assert sum(tuple(question["pair"] or ()) in UNSEEN for question in QUESTIONS) >= 4
    thought = [question for question in QUESTIONS if question["reasoning"] is not None]
    assert sorted(question["kind"] for question in thought) == sorted(THINKING_KINDS)
