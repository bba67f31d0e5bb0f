"""Data sets as other trainers have them: every shape becomes the same chat in OpenAI form."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from spyglass.config import read_model_config
from spyglass.errors import PromptError
from spyglass.prompt.tokenizer import load_tokenizer
from spyglass.train.data import Learner, read_chats
from spyglass.train.entries import chat_of, read_entries

USER, ANSWER = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A red square."}
SAID = [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "A red square."}]
SYSTEM = {"role": "system", "content": "Be brief."}
MARKED = {"role": "user", "content": "<image>What is it?"}


@pytest.fixture(scope="module")
def learner(tiny_folder: Path) -> Learner:
    tokenizer = load_tokenizer(tiny_folder)
    assert tokenizer is not None
    return Learner(read_model_config(tiny_folder), tokenizer)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, colour in enumerate(("red", "blue")):
        Image.new("RGB", (60, 40), colour).save(tmp_path / f"{number}.png")
    return tmp_path


TEXTS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "messages": ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
    "from and value": ({"conversations": SAID}, [USER, ANSWER]),
    "from and value under messages": ({"messages": SAID}, [USER, ANSWER]),
    "a system column": ({"system": "Be brief.", "conversations": SAID}, [SYSTEM, USER, ANSWER]),
    "a system turn": (
        {"conversations": [{"from": "system", "value": "Be brief."}, *SAID]},
        [SYSTEM, USER, ANSWER],
    ),
    "two lists of messages": ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, [SYSTEM, USER, ANSWER]),
    "two texts": ({"query": "What is it?", "response": "A red square."}, [USER, ANSWER]),
    "a history": (
        {"query": "What is it?", "response": "A red square.", "history": [["What is it?", "A red square."]]},
        [USER, ANSWER, USER, ANSWER],
    ),
    "an instruction and its input": (
        {"instruction": "What is it?", "input": "this", "output": "A red square."},
        [{**USER, "content": "What is it?\nthis"}, ANSWER],
    ),
}


@pytest.mark.parametrize("shape", TEXTS)
def test_g1_every_shape_of_chat_is_the_same_chat_and_other_columns_are_named(shape: str, tmp_path: Path) -> None:
    entry, messages = TEXTS[shape]
    raw = chat_of({**entry, "id": 7, "source": "web", "note": None}, tmp_path)
    assert raw.messages == messages and raw.ignored == {"id", "source"}


def test_g1_calls_and_tools_of_from_and_value_chats(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    said = [
        SAID[0],
        {"from": "function_call", "value": json.dumps({"name": "look", "arguments": {"at": 1}})},
        {"from": "observation", "value": "a square"},
        SAID[1],
    ]
    raw = chat_of({"conversations": said, "tools": json.dumps([tool])}, tmp_path)
    assert raw.tools == [tool] and [one["role"] for one in raw.messages] == ["user", "assistant", "tool", "assistant"]
    assert raw.messages[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 1}'}


def shown(part: dict[str, Any]) -> dict[str, Any]:
    """A chat with a question in two parts."""
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}, ANSWER]}


def images_of(folder: Path) -> dict[str, dict[str, Any]]:
    content, part, marked = (folder / "0.png").read_bytes(), {"type": "image"}, {"messages": [MARKED, ANSWER]}
    return {
        "paths": {**marked, "images": ["0.png"]},
        "one image": {**marked, "image": "0.png"},
        "objects with paths": {**marked, "images": [{"path": "0.png", "bytes": None}]},
        "objects with bytes": {**marked, "images": [{"bytes": content, "path": "gone.png"}]},
        "bytes": {**marked, "images": [content]},
        "from and value": {
            "conversations": [{"from": "human", "value": MARKED["content"]}, SAID[1]],
            "images": ["0.png"],
        },
        "parts in the place of images": {**shown(part), "images": ["0.png"]},
        "parts with their image": shown({**part, "image": "0.png"}),
        "parts with their path": shown({**part, "path": "0.png"}),
        "images without marks": {"messages": [USER, ANSWER], "images": ["0.png"]},
        "OpenAI": shown({"type": "image_url", "image_url": {"url": "0.png"}}),
    }


def test_g1_every_way_to_give_an_image_is_the_same_sample(folder: Path, learner: Learner) -> None:
    samples = {}
    for name, entry in images_of(folder).items():
        raw = chat_of(entry, folder)
        samples[name] = learner.sample(raw.messages)
        assert not raw.ignored, name
    expected = samples["OpenAI"]
    assert len(expected.prompt.patches) == 1
    for name, sample in samples.items():
        assert np.array_equal(sample.prompt.ids_T, expected.prompt.ids_T), name
        assert np.array_equal(sample.prompt.patches[0], expected.prompt.patches[0]), name


def test_g1_images_stand_where_their_marks_are_in_order(folder: Path) -> None:
    entry = {
        "messages": [{"role": "user", "content": "One <image> and <image>?"}, ANSWER],
        "images": ["0.png", "1.png"],
    }
    content = chat_of(entry, folder).messages[0]["content"]
    kinds = [part.get("text") or part["image_url"]["url"].name for part in content]
    assert kinds == ["One ", "0.png", " and ", "1.png", "?"]


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"messages": [MARKED, ANSWER]}, "1 marks for images .* and 0 images"),
        ({"messages": [MARKED, ANSWER], "images": ["0.png", "1.png"]}, "1 marks .* and 2 images"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "1 marks .* and 0 images"),
        ({"messages": [USER, ANSWER], "images": ["https://example.org/a.png"]}, "not fetched"),
        ({"messages": [USER, ANSWER], "images": [7]}, "an image is '7'"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "from 'narrator'; known are human"),
        ({"conversations": [{"from": "function_call", "value": "look()"}]}, "no JSON object with name"),
        ({"text": "hello"}, 'a list "messages"; read are too: messages, conversations'),
        ({"messages": [USER, ANSWER], "tools": "{"}, "tools is a text that is not JSON"),
        (["hello"], "must be an object"),
    ],
)
def test_g1_what_cannot_be_meant_is_told(entry: Any, why: str, folder: Path) -> None:
    with pytest.raises(PromptError, match=why):
        chat_of(entry, folder)


def test_g1_json_arrays_are_read_like_lines(folder: Path, learner: Learner) -> None:
    entries = [images_of(folder)["paths"], {"conversations": SAID, "id": 1}]
    (folder / "a.json").write_text(json.dumps(entries, indent=2))
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, entries)))
    one, other = (
        read_chats(folder / name, learner, most_tokens=4096, progress=False)[0] for name in ("a.json", "a.jsonl")
    )
    assert [chat.messages for chat in one] == [chat.messages for chat in other]
    assert [chat.digest for chat in one] == [chat.digest for chat in other] and one[1].ignored == {"id"}
    (folder / "bad.json").write_text("[1, ")
    with pytest.raises(PromptError, match="begins like a JSON array and is none"):
        read_entries(folder / "bad.json")


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is here")
def test_g1_parquet_without_pyarrow_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1....PAR1")
    with pytest.raises(PromptError, match="pip install pyarrow"):
        read_entries(tmp_path / "a.parquet")


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_g1_parquet_rows_are_entries(folder: Path, learner: Learner) -> None:
    import pyarrow
    import pyarrow.parquet

    image = {"bytes": (folder / "0.png").read_bytes(), "path": None}
    rows = [{"messages": [MARKED, ANSWER], "images": [image], "id": 1}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    (chat,), faults = read_chats(folder / "a.parquet", learner, most_tokens=4096, progress=False)
    assert not faults and chat.images == 1 and chat.ignored == {"id"}
    (folder / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(PromptError, match="cannot be read as Parquet"):
        read_entries(folder / "bad.parquet")
