"""Whatever is sent, somebody answers: a client's fault is a client error in the protocol's form, never a 500 or a hang.

The engine only checks what it is given and says some words, so that thousands of bodies cost little.
"""

from __future__ import annotations

import base64
import copy
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.engine.sequence import Request
from spyglass.engine.worker import EngineWorker
from spyglass.server.app import create_app
from tests.scripted import ScriptedEngine
from tests.server.parts import Live, data_url, running

PICTURE = data_url()
TOOL = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": PICTURE}}],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "so",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "seen"},
    ],
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": "auto",
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 2,
    "stop": ["x"],
    "logprobs": True,
    "top_logprobs": 2,
    "max_tokens": 5,
    "seed": 1,
    "stream_options": {"include_usage": True},
    "stream": True,
    "thinking": {"type": "disabled"},
}
FORMED = {
    "messages": [{"role": "user", "content": "hi"}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    "max_tokens": 5,
    "logit_bias": {"7": 1.5},
}
MESSAGES: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "be brief"}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hi"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE[22:]}},
            ],
        },
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {"x": "y"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "seen"}]},
    ],
    "tools": [{"name": "look", "description": "d", "input_schema": TOOL["parameters"]}],
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "stream": True,
}
RESPONSES: dict[str, Any] = {
    "model": "tiny",
    "instructions": "be brief",
    "input": [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "hi"},
                {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
            ],
        },
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "seen"},
    ],
    "tools": [{"type": "function", **TOOL}],
    "max_output_tokens": 5,
    "text": {"format": {"type": "text"}},
    "stream": True,
}
COMPLETIONS: dict[str, Any] = {
    "model": "tiny",
    "prompt": [0, 5, 6],
    "max_tokens": 3,
    "n": 2,
    "echo": False,
    "logprobs": 2,
    "stop": ["x"],
    "stream": False,
}
COUNTED = {name: value for name, value in MESSAGES.items() if name not in ("max_tokens", "stream")}
BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", FORMED),
    ("/v1/messages", MESSAGES),
    ("/v1/messages/count_tokens", COUNTED),
    ("/v1/responses", RESPONSES),
    ("/v1/completions", COMPLETIONS),
    ("/tokenize", {"prompt": "text"}),
    ("/detokenize", {"tokens": [5, 6]}),
]


class Checking(ScriptedEngine):
    """Refuses what the real engine refuses; then says a few words, some of which look like markup."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(lambda prompt, params: ["Well", ", <", "/think> ", "{", '"n"', ": 1}"][: params.max_tokens])
        self._llm = llm

    def submit(self, request: Request, **options: Any) -> int:
        self._llm.engine.prepare(request.prompt, request.params)
        return super().submit(request, **options)


@pytest.fixture(scope="module")
def open_to_all(llm: LLM) -> Iterator[Live]:
    """A server of all protocols."""
    worker = EngineWorker(Checking(llm), max_live=200)
    with running(create_app(llm, ServerConfig(max_body_bytes=1 << 20), worker=worker)) as server:
        yield server


NUMBERS = st.integers(-3, 10**20) | st.floats(allow_nan=False, allow_infinity=False)
WORDS = ["user", "tool", "auto", "required", "<｜image｜>", "</think>", PICTURE, "data:,", "\x00", "model"]
NAMES = ["type", "text", "content", "role", "url", "image_url", "name", "id", "schema", "properties", "x"]
SMALL = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=9) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from places(inner)


@st.composite
def changed(draw: st.DrawFn, body: Mapping[str, Any]) -> Any:
    """A good body with one to three things in it replaced, taken out, doubled or added."""
    new = copy.deepcopy(dict(body))
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(new))
        if not found:
            return new
        container, key = found[draw(st.integers(0, len(found) - 1))]
        deed = draw(st.sampled_from(["replace", "replace", "remove", "double", "add"]))
        if deed == "remove":
            del container[key]
        elif deed == "double":
            container[key] = [copy.deepcopy(container[key])] * 2
        elif deed == "add" and isinstance(container, dict):
            container[draw(st.sampled_from(["name", "type", "strict", "audio", "cache_control", "text", "zzz"]))] = (
                draw(SMALL)
            )
        else:
            container[key] = draw(SMALL)
    return new


def require_answer(answer: httpx.Response) -> None:
    """An answer, or a refusal that says something, as JSON."""
    assert answer.status_code in (200, 400, 404, 429), (answer.status_code, answer.text[:500])
    if answer.status_code != 200:
        body = answer.json()
        assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    elif not answer.headers["content-type"].startswith("text/event-stream"):
        answer.json()
    else:
        assert "event: error\n" not in answer.text and '"error":{' not in answer.text, answer.text[-500:]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[f"{path} {n}" for n, (path, _) in enumerate(BODIES)])
def test_the_bodies_that_are_changed_are_good_before(path: str, body: dict[str, Any], open_to_all: Live) -> None:
    answer = open_to_all.post(body, path)
    assert answer.status_code == 200, answer.text
    require_answer(answer)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body"), BODIES, ids=[f"{path} {n}" for n, (path, _) in enumerate(BODIES)])
@given(data=st.data())
@settings(max_examples=100)
def test_a_changed_body_is_answered_or_refused(
    path: str, body: dict[str, Any], open_to_all: Live, data: st.DataObject
) -> None:
    sent = data.draw(changed(body))
    require_answer(open_to_all.client.post(path, content=json.dumps(sent).encode(), headers=JSON))


JSON = {"content-type": "application/json"}


@pytest.mark.slow
@given(content=st.binary(max_size=40) | st.text(max_size=40).map(lambda text: json.dumps(text).encode()))
def test_any_bytes_are_answered(content: bytes, open_to_all: Live) -> None:
    for path in ("/v1/chat/completions", "/v1/messages"):
        answer = open_to_all.client.post(path, content=content, headers=JSON)
        assert answer.status_code == 400
        require_answer(answer)


def encoded(kind: str) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (12, 20, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about what was damaged on purpose
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
@given(data=st.data())
def test_a_damaged_picture_is_seen_or_refused(kind: str, open_to_all: Live, data: st.DataObject) -> None:
    file = bytearray(encoded(kind))
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, min(len(file), 120) - 1) | st.integers(0, len(file) - 1))
        file[place] = data.draw(st.integers(0, 255))
    file = file[: data.draw(st.integers(1, len(file)) | st.just(len(file)))]
    url = "data:image/png;base64," + base64.b64encode(bytes(file)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    require_answer(open_to_all.post(body, "/v1/chat/completions"))


@pytest.mark.slow
@given(
    path=st.text(min_size=1, max_size=20), method=st.sampled_from(["GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE"])
)
def test_any_path_and_method_are_answered(path: str, method: str, open_to_all: Live) -> None:
    quoted = "/" + "".join(f"%{byte:02X}" for byte in path.encode("utf-8", "replace"))
    answer = open_to_all.client.request(method, quoted)
    assert answer.status_code in (200, 400, 404, 405, 415)


def test_after_all_of_it_the_server_is_well(open_to_all: Live) -> None:
    open_to_all.wait_until_idle()
    assert open_to_all.client.get("/health").status_code == 200
