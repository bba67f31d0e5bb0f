"""What everybody asks first, of ten pictures, the picture before the question and behind it: both models that come with
the package answer with the one true sentence, and say so where they were taught nothing that would do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import skimage.data
from PIL import Image

from spyglass.config.shipped import shipped_models
from spyglass.engine.llm import LLM
from spyglass.engine.request import SamplingParams
from spyglass.tiny_world.cases import Split, make_case
from spyglass.tiny_world.sayings import UNKNOWN
from spyglass.tiny_world.uses import told_of

SEED = 20_261_201
# Kind of case, split and number: each token of their answers is at least 1 nat likelier than the next, of the drawing's
# and the photograph's 5.
SCENES: tuple[tuple[str, Split, int], ...] = (
    ("colour", "test", 0),
    ("shape", "test", 1),
    ("count", "test", 9),
    ("position", "test", 3),
    ("number", "test", 4),
    ("word", "test", 5),
    ("colour", "unseen", 6),
    ("position", "unseen", 7),
)
# question, and which true sentence answers it; None = nothing that was taught
QUESTIONS = {
    "What do you see?": "see",
    "Describe the picture.": "see",
    "What is this?": "this",
    "Say something.": "see",
    "Read the text.": "read",
    "Describe this image.": "see",
    "What can you see?": "see",
    "Please read the text.": "read",
    "What is the capital of France?": None,
    "Who painted this?": None,
}
SHAPES = Path(__file__).resolve().parents[2] / "examples" / "shapes.jpg"
PARAMS = SamplingParams(temperature=0, max_tokens=64)


def pictures() -> Iterator[tuple[Image.Image, dict[str | None, str]]]:
    """Ten pictures, each with the sentence of each form."""
    for kind, split, number in SCENES:
        case = make_case(SEED, number, split, kinds=(kind,))
        (scene,), (image,) = case.scenes, case.images
        yield image, {None: UNKNOWN} | {form: told_of(form, scene) for form in ("see", "this", "read")}
    shown = "I see one red triangle, one yellow circle and one blue square."
    yield Image.open(SHAPES), {"see": shown, "this": shown, "read": "I see no text.", None: UNKNOWN}
    yield Image.fromarray(skimage.data.astronaut()), dict.fromkeys((None, "see", "this", "read"), UNKNOWN)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped_models() or [None])
def test_first_questions_are_answered_with_a_true_sentence(name: str | None, device: str) -> None:
    if name is None:
        pytest.skip("no model comes with this checkout: there is no folder spyglass/models")
    chats: list[list[dict[str, Any]]] = []
    wanted = []
    for image, sentences in pictures():
        shown = {"type": "image_url", "image_url": {"url": image}}
        for question, form in QUESTIONS.items():
            asked = {"type": "text", "text": question}
            for content in ([shown, asked], [asked, shown]):
                chats.append([{"role": "user", "content": content}])
                wanted.append((question, sentences[form]))
    outputs = LLM(name, device=device).chat(chats, PARAMS)
    said = [(question, output.text) for (question, _), output in zip(wanted, outputs, strict=True)]
    assert said == wanted
