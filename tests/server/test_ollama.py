"""Ollama's protocol, read by its own client: chats, prompts, images, tools, forms of answer and thinking."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import ollama
import pytest
from PIL import Image
from pydantic import BaseModel, ConfigDict

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.engine.request import Delta
from spyglass.errors import PromptError
from spyglass.server.app import create_app
from spyglass.server.exchange import Call, Immediate
from spyglass.server.protocols.ollama import OllamaChat, OllamaGenerate
from tests.server.parts import Live, data_url, running
from tests.server.protocol_parts import FAMILIES, PATH, Family, cut, last_delta, output, served_of
from tests.server.protocol_parts import call_of as chat_call
from tests.server.test_replies import block, invoke, parameter, tags
from tests.unit.prompt.test_data_url import PLAIN

PHOTO = Path(__file__).resolve().parents[2] / "examples" / "shapes.jpg"
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": PATH}}
ASKED: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def parse(body: dict[str, Any], family: Family = "deepseek_v4", kind: Any = OllamaChat) -> Call:
    call = kind(served_of(family)).parse(body, None)
    assert isinstance(call, Call)
    return call


def ids(call: Call) -> list[int]:
    found: list[int] = call.prompt.ids_T.tolist()
    return found


def lines(call: Call, text: str, **more: Any) -> list[dict[str, Any]]:
    """What a client reads when the answer comes in pieces."""
    pieces, whole = cut(text, 3), output(text, [5, 6], **more)
    data = call.reply.begin("r") + b"".join(
        call.reply.push(0, Delta(request_id=0, text=piece, token_ids=())) for piece in pieces
    )
    data += call.reply.push(0, last_delta("", whole)) + call.reply.end()
    return [json.loads(line) for line in data.splitlines()]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_has_the_prompt_that_the_same_chat_has_elsewhere(family: Family) -> None:
    """With an image before the text, tools, a call and its answer, and thinking on."""
    question = {"role": "user", "content": "Where?", "images": [PLAIN]}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"n": 1}}}]}
    told = {"role": "tool", "content": "there", "tool_name": "look"}
    system = {"role": "system", "content": "Be brief."}
    mine = parse({**ASKED, "messages": [system, question, called, told], "tools": [TOOL], "think": True}, family)
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PLAIN}"}}
    function = {"name": "look", "arguments": '{"n": 1}'}
    messages = [
        system,
        {"role": "user", "content": [image, {"type": "text", "text": "Where?"}]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "content": "there", "tool_call_id": "a"},
    ]
    theirs = chat_call("chat", family, messages=messages, tools={"look": PATH}, thinking=True)
    assert mine.images == 1 and ids(mine) == ids(theirs)


def test_generate_is_a_chat_of_one_question_and_raw_is_the_text_itself() -> None:
    asked = {"model": "tiny:latest", "prompt": "Where?", "system": "Be brief.", "images": [PLAIN]}
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?", "images": [PLAIN]},
    ]  # fmt: skip
    assert ids(parse(asked, kind=OllamaGenerate)) == ids(parse({**ASKED, "messages": messages}))
    raw = parse({"model": "tiny", "prompt": "Where?", "raw": True}, kind=OllamaGenerate)
    assert len(ids(raw)) < len(ids(parse({"model": "tiny", "prompt": "Where?"}, kind=OllamaGenerate)))


def test_options_are_those_of_sampling_and_what_says_nothing_here_is_named() -> None:
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 4, "num_predict": 7, "stop": ["x"]}
    options |= {"repeat_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4, "num_ctx": 2048}
    call = parse({**ASKED, "options": options, "keep_alive": "5m"})
    params = call.params[0]
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.5, 3, 0.9, 0.1, 4)
    assert (params.max_tokens, params.stop, params.repetition_penalty) == (7, ("x",), 1.2)
    assert (params.presence_penalty, params.frequency_penalty) == (0.3, 0.4)
    assert set(call.ignored) == {"keep_alive", "options.num_ctx"}
    assert call.stream, "this protocol streams unless told otherwise"
    assert parse({**ASKED, "options": {"num_predict": -1}}).params[0].max_tokens == 4096


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"options": {"mirostat": 2}}, "options.mirostat is not available"),
        ({"options": {"temperature": -1}}, "temperature is -1"),
        ({"format": "xml"}, "format is 'xml'"),
        ({"think": 3}, "think is '3'"),
        ({"messages": [{"role": "user", "content": "a", "images": ["%%"]}]}, r"messages\[0\].images\[0\]"),
        ({"messages": [{"role": "judge", "content": "a"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "there is none before it"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": 1}]}, None),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_refused_by_its_place(body: dict[str, Any], why: str | None) -> None:
    if why is None:  # a field that says nothing for this role
        assert parse({**ASKED, **body})
        return
    with pytest.raises(PromptError, match=why):
        parse({**ASKED, **body})


def test_lines_add_up_to_the_whole_body() -> None:
    text = "because</think>It is there."
    call = parse({**ASKED, "think": True})
    streamed = lines(call, text)
    assert all(not one["done"] for one in streamed[:-1]) and streamed[-1]["done"]
    said = {name: "".join(one["message"].get(name, "") for one in streamed[:-1]) for name in ("content", "thinking")}
    assert said == {"content": "It is there.", "thinking": "because"}
    call = parse({**ASKED, "think": True})
    assert call.reply.push(0, last_delta(text, output(text, [5, 6]))) == b""
    status, whole = call.reply.whole("r")
    assert status == 200 and whole["message"] == {"role": "assistant", **said} and whole["done_reason"] == "stop"
    assert (
        set(whole) == set(streamed[-1])
        and whole["eval_count"] == 2
        and whole["prompt_eval_count"] == 9 - 9 + len(ids(call))
    )
    generated = parse({"model": "tiny", "prompt": "a", "think": True}, kind=OllamaGenerate)
    assert "".join(one["response"] for one in lines(generated, text)) == "It is there."


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_come_whole_with_their_arguments_as_objects_and_half_ones_not_at_all(family: Family) -> None:
    answer = tags("Look:" + block(invoke("look", parameter("path", "a b"), parameter("n", "3", text=False))), family)
    body = {**ASKED, "tools": [TOOL]}
    streamed = lines(parse(body, family), answer)
    made = [call for one in streamed for call in one["message"].get("tool_calls", ())]
    assert [call["function"] for call in made] == [{"index": 0, "name": "look", "arguments": {"path": "a b", "n": 3}}]
    call = parse(body, family)
    call.reply.push(0, last_delta(answer, output(answer, [5])))
    _, whole = call.reply.whole("r")
    assert [one["function"] for one in whole["message"]["tool_calls"]] == [made[0]["function"]]
    assert whole["message"]["content"] == "Look:" and whole["done_reason"] == "stop"
    half = lines(parse(body, family), answer[: answer.index("a b") + 1], reason="length")
    assert half[-1]["done_reason"] == "length" and not any("tool_calls" in one["message"] for one in half)


def test_an_error_in_the_midst_is_a_line_that_the_client_raises() -> None:
    streamed = lines(parse(ASKED), "half", reason="abort", error="the model failed")
    assert streamed[-1] == {"error": "the model failed"}


def test_a_request_without_a_prompt_is_answered_at_once() -> None:
    for kind, said in ((OllamaChat, "message"), (OllamaGenerate, "response")):
        answer = kind(served_of()).parse({"model": "tiny:latest", "keep_alive": 0}, None)
        assert isinstance(answer, Immediate) and answer.body["done_reason"] == "unload" and said in answer.body


@pytest.fixture(scope="module")
def shipped() -> Iterator[Live]:
    llm = LLM("spyglass-tiny-v4", device="cpu", max_sequences=4, cache_bytes=200 << 20)
    with running(create_app(llm, ServerConfig(grace_seconds=1))) as live:
        yield live


@pytest.fixture(scope="module")
def client(shipped: Live) -> ollama.Client:
    return ollama.Client(host=shipped.url)


class Seen(BaseModel):
    """What the model is to fill in."""

    model_config = ConfigDict(extra="forbid")

    shape: Literal["circle", "triangle", "square", "star"]


@pytest.mark.slow
def test_its_own_client_sees_what_is_there(client: ollama.Client, shipped: Live) -> None:
    (card,) = client.list().models
    assert card.model == "spyglass-tiny-v4:latest" and client.ps().models[0].model == card.model
    assert re.fullmatch("[0-9a-f]{64}", card.digest or ""), "`ollama list` cuts it to twelve digits"
    shown = client.show("spyglass-tiny-v4")
    assert {"vision", "tools", "completion"} <= set(shown.capabilities or ())
    question = "What shape is the red thing?"
    options = {"temperature": 0, "num_predict": 16}
    whole = client.chat(card.model, [{"role": "user", "content": question, "images": [str(PHOTO)]}], options=options)
    assert whole.message.content and whole.done_reason == "stop" and whole.prompt_eval_count
    stream = client.chat(
        "spyglass-tiny-v4", [{"role": "user", "content": question, "images": [PHOTO]}], options=options, stream=True
    )
    assert "".join(part.message.content or "" for part in stream) == whole.message.content
    generated = client.generate("spyglass-tiny-v4", question, images=[PHOTO.read_bytes()], options=options)
    assert generated.response == whole.message.content
    image = {"type": "image_url", "image_url": {"url": data_url(Image.open(PHOTO))}}
    body = {"messages": [{"role": "user", "content": [image, {"type": "text", "text": question}]}]}
    direct = shipped.post({**body, "temperature": 0, "max_tokens": 16}, "/v1/chat/completions")
    assert direct.json()["choices"][0]["message"]["content"] == whole.message.content
    with pytest.raises(ollama.ResponseError, match="is not served here") as missing:
        client.chat("llama3", [{"role": "user", "content": "hi"}])
    assert missing.value.status_code == 404


@pytest.mark.slow
def test_its_own_client_gets_json_by_schema(client: ollama.Client) -> None:
    answer = client.chat(
        "spyglass-tiny-v4",
        [{"role": "user", "content": "What shape is the red thing?", "images": [PHOTO]}],
        format=Seen.model_json_schema(),
        options={"temperature": 0, "num_predict": 60},
    )
    assert Seen.model_validate_json(answer.message.content or "")
