"""`LLM.chat` as people call it first: a text, a path, a class as the form of the answer, reasoning apart."""

from __future__ import annotations

import enum
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pydantic import BaseModel, ConfigDict

import spyglass
from spyglass import LLM, PromptError, RequestOutput, SamplingParams, Structured, Usage
from spyglass.engine.inputs import adapter_places, without_reasoning
from spyglass.errors import AdapterError
from tests.unit.engine.test_llm import GREEDY, OPTIONS, picture, question


class Mode(enum.Enum):
    NEAR = "near"
    FAR = "far"


class Seen(BaseModel):
    """Short enough for a model of random weights."""

    model_config = ConfigDict(extra="forbid")
    mode: Mode
    sure: bool


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> LLM:
    return LLM(tiny_folder, **OPTIONS)


def test_a_text_is_what_the_user_says(llm: LLM) -> None:
    asked = llm.chat(question("Hello"), GREEDY)
    assert llm.chat("Hello", GREEDY).token_ids == asked.token_ids
    both = llm.chat(["Hello", question("Hello")], GREEDY)
    assert [output.token_ids for output in both] == [asked.token_ids] * 2
    assert asked.reasoning is None


def test_images_are_paths_bytes_or_what_messages_hold(llm: LLM, tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    picture().save(photo)
    told = llm.chat(question("?", photo), GREEDY)
    for source in (str(photo), photo, photo.read_bytes(), Image.open(photo)):
        assert llm.chat("?", GREEDY, images=[source]).token_ids == told.token_ids
        assert llm.chat("?", GREEDY, images=source).token_ids == told.token_ids, "one is as good as a list of one"
    assert llm.chat(question("?"), GREEDY, images=[photo]).token_ids == told.token_ids
    with pytest.raises(PromptError, match="there is none"):
        llm.chat([*question("?"), {"role": "assistant", "content": "a"}], GREEDY, images=[photo])
    with pytest.raises(PromptError, match=r"pathlib\.Path"):  # a text in a message may come from anybody
        llm.chat(question("?", str(photo)), GREEDY)


def test_a_class_or_a_schema_is_the_form_of_an_answer(llm: LLM) -> None:
    params = SamplingParams(structured=Seen, max_tokens=60, seed=1)
    assert params.structured == Structured(kind="json_schema", value=Seen.model_json_schema())
    assert SamplingParams(structured=Seen.model_json_schema()).structured == params.structured
    assert Seen.model_validate_json(llm.chat("Where?", params).text)
    output = llm.chat("Where?", replace(params, max_tokens=300, logit_bias={}), thinking=True)
    if output.finish_reason == "stop":
        assert output.reasoning is not None and Seen.model_validate_json(output.text)
    for wrong in (3, "json", int, Seen(mode=Mode.FAR, sure=True)):
        with pytest.raises(PromptError, match="a Pydantic class or a JSON schema"):
            SamplingParams(structured=wrong)


def answer(text: str, **more: Any) -> RequestOutput:
    usage = Usage(prompt_tokens=1, image_tokens=0, completion_tokens=1)
    return RequestOutput(
        **{"request_id": 0, "text": text, "token_ids": (), "finish_reason": "stop", "usage": usage} | more
    )


@pytest.mark.parametrize(
    ("given", "reasoning", "text"),
    [
        (answer("\nbecause\n</think>\n\nIt is."), "because", "It is."),
        (answer("because</think>"), "because", ""),
        (answer("because", finish_reason="length"), "because", ""),
        (answer("It is."), "It is.", "It is."),
        (answer("It is", stopped_by="."), "It is", ""),
        (answer("a</think>b</think>c"), "a", "b</think>c"),
    ],
)
def test_reasoning_and_text_come_apart(given: RequestOutput, reasoning: str, text: str) -> None:
    output = without_reasoning(given)
    assert (output.reasoning, output.text) == (reasoning, text)


def test_chat_with_thinking_gives_them_apart(llm: LLM) -> None:
    streamed = "".join(delta.text for delta in llm.stream(question("Hello"), GREEDY, thinking=True))
    output = llm.chat("Hello", GREEDY, thinking=True)
    assert output.reasoning == streamed.strip() and output.text == "", "all of it, since the answer was cut off"


def test_adapters_may_be_named_by_what_they_are() -> None:
    assert adapter_places(["roman", Path("some/french")]) == {"roman": "roman", "french": Path("some/french")}
    assert adapter_places({"a": "b"}) == {"a": "b"} and adapter_places(None) == {} and adapter_places("x") == {"x": "x"}
    with pytest.raises(AdapterError, match="in a list or by name"):
        adapter_places(3)


@pytest.mark.slow
def test_shipped_adapters_are_loaded_by_name() -> None:
    llm = LLM("spyglass-tiny-v4", adapters=["roman"], device="cpu")
    params = SamplingParams(temperature=0, max_tokens=12)
    photo = Path(__file__).resolve().parents[3] / "examples" / "shapes.jpg"
    asked = "How many shapes are there?"
    plain, roman = (llm.chat(asked, params, images=[photo], adapter=name) for name in (None, "roman"))
    assert llm.adapters == ("roman",) and plain.text != roman.text


def test_what_people_import_is_there() -> None:
    for name in spyglass.__all__:
        assert getattr(spyglass, name) is not None
    assert issubclass(spyglass.CapacityError, spyglass.SpyglassError)
    assert spyglass.EngineConfig(max_sequences=2).max_sequences == 2
