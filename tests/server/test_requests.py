"""Requests: pictures wherever a protocol has them, text that stays text, no field that is lost in silence."""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any

import pytest

from spyglass.engine.request import Structured
from spyglass.errors import CapacityError, NotServedError, PromptError
from spyglass.prompt.chat import IMAGE_LEFT_OUT
from spyglass.server.protocols.completions import CompletionsEndpoint
from spyglass.server.protocols.count import Tokenize
from tests.server.protocol_parts import (
    FAMILIES,
    PATH,
    PROTOCOLS,
    URL,
    ChatProtocol,
    Family,
    body_of,
    call_of,
    endpoint_of,
    picture,
    served_of,
    tokenizer_of,
    words,
)
from tests.unit.prompt.conftest import PLACEHOLDER
from tests.unit.prompt.pictures import encode, noise
from tests.unit.prompt.test_data_url import SPELLINGS

MARKS = ["<｜deepseek_image｜>", "<｜image｜>", "<｜image2｜>"]
PHOTO = "data:image/png;base64," + base64.b64encode(encode(noise(640, 480), "PNG")).decode()


_ENDLESS: Any = {"type": "object", "properties": {"more": {"$ref": "#/$defs/x"}}, "required": ["more"]}
ENDLESS = {**_ENDLESS, "$defs": {"x": _ENDLESS}}


def refusal(protocol: ChatProtocol, family: Family = "deepseek_v4", **body: Any) -> str:
    with pytest.raises(PromptError) as caught:
        endpoint_of(protocol, family, strict_fields=True).parse(body_of(protocol, **body), None)
    return str(caught.value)


def tool_result(protocol: ChatProtocol, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A conversation whose last word is a tool's, in parts."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"path": "/x"}'}}
    if protocol == "chat":
        turn: Any = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        return {
            "messages": [
                {"role": "user", "content": "q"},
                *turn,
                {"role": "tool", "tool_call_id": "c", "content": parts},
            ]
        }
    if protocol == "responses":
        item = {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"path": "/x"}'}
        result = {"type": "function_call_output", "call_id": "c", "output": parts}
        return {"input": [{"role": "user", "content": "q"}, item, result]}
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {"path": "/x"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": parts}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return {"messages": [{"role": "user", "content": "q"}, *turns], "max_tokens": 5}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("family", "grown"), [("deepseek_v41", 206), ("deepseek_v4", 206)])
def test_a_picture_in_a_tool_result_is_seen(protocol: ChatProtocol, family: Family, grown: int) -> None:
    tools = body_of(protocol, tools={"look": PATH})["tools"]
    endpoint, blank = endpoint_of(protocol, family), len(tokenizer_of(family).encode_text("\n\n"))
    without = endpoint.parse({**tool_result(protocol, [words(protocol, "res")]), "tools": tools}, None)
    parts = [words(protocol, "res"), picture(protocol, PHOTO)]
    call = endpoint.parse({**tool_result(protocol, parts), "tools": tools}, None)
    lead = call.prompt.spans[0].lead
    assert len(call.prompt) - len(without.prompt) == grown + blank + lead and call.images == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_spelling_of_a_data_url_is_the_same_picture(protocol: ChatProtocol) -> None:
    urls = SPELLINGS.values() if protocol != "messages" else [SPELLINGS["plain"], SPELLINGS["no padding"]]
    digests = {call_of(protocol, content=[picture(protocol, url)]).prompt.digests for url in urls}
    assert len(digests) == 1
    for bad, why in [("data:image/png;base64", "without a comma"), ("data:image/png;base64,@@@", "not base64")]:
        if protocol != "messages":
            assert why in refusal(protocol, content=[picture(protocol, bad)])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_remote_pictures_come_from_the_hook_and_nowhere_else(protocol: ChatProtocol) -> None:
    part: dict[str, Any] = picture(protocol, URL)
    address = "https://pictures.example/a.png"
    if protocol == "messages":
        part["source"] = {"type": "url", "url": address}
    else:
        part["image_url"] = address if protocol == "responses" else {"url": address}
    asked = []

    def fetch(url: str) -> bytes:
        asked.append(url)
        return encode(noise(8, 8), "PNG")

    body, endpoint = body_of(protocol, content=[part]), endpoint_of(protocol)
    call = endpoint.parse(body, fetch)
    assert asked == [address] and call.prompt.digests == call_of(protocol, content=[picture(protocol)]).prompt.digests
    with pytest.raises(PromptError, match="fetches no images, send it as a data URL"):
        endpoint.parse(body, None)
    long = json.loads(json.dumps(body).replace("a.png", "a" * 8193))
    with pytest.raises(PromptError, match="8192"):
        endpoint.parse(long, fetch)
    asked.clear()
    with pytest.raises(PromptError, match="the limit is 600"):
        endpoint.parse(body_of(protocol, content=[part] * 700), lambda url: asked.append(url) or b"no picture")
    assert len(asked) == 600, "what is over the limit is not fetched"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mark", MARKS)
def test_a_stray_placeholder_anywhere_is_text(family: Family, mark: str) -> None:
    """History, reasoning, tool results and descriptions hold the text, one real picture is there: one span, no 500."""
    tool = {"type": "function", "function": {"name": "look", "description": f"sees {mark}", "parameters": PATH}}
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": json.dumps({"path": mark})}}
    messages = [
        {"role": "user", "content": f"q {mark}"},
        {"role": "assistant", "content": f"a {mark}", "reasoning_content": f"r {mark}", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": f"listing: {mark}"},
        {"role": "user", "content": [words("chat", mark), picture("chat")]},
    ]
    endpoint = endpoint_of("chat", family)
    prompt = endpoint.parse({"messages": messages, "tools": [tool]}, None).prompt
    assert len(prompt.spans) == 1 and PLACEHOLDER not in prompt.ids_T
    messages[-1]["content"] = "go on"
    prompt = endpoint.parse({"messages": messages, "tools": [tool]}, None).prompt
    text = tokenizer_of(family).decode(prompt.ids_T.tolist())
    assert PLACEHOLDER not in prompt.ids_T and text.count(mark) == 5 + (f"r {mark}" in text)


def test_ids_that_already_stand_for_pictures_are_refused_with_the_form_that_is_wanted() -> None:
    completions = CompletionsEndpoint(served_of("deepseek_v41"))
    tokens = Tokenize(served_of("deepseek_v41")).parse(
        {"messages": [{"role": "user", "content": [picture("chat")]}]}, None
    )
    assert tokens.body["count"] == len(tokens.body["tokens"]) > 184 and -1 in tokens.body["tokens"]
    for ids in ([0, PLACEHOLDER], [0, *[PLACEHOLDER] * 184], tokens.body["tokens"], [129280], [0, 1.5], [True]):
        with pytest.raises(PromptError, match="prompt: part 0"):
            completions.parse({"prompt": ids}, None)
    assert len(completions.parse({"prompt": [0, 5]}, None).prompt) == 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_text_only_model_names_the_old_picture_or_notes_it(protocol: ChatProtocol) -> None:
    body = tool_result(protocol, [words(protocol, "res"), picture(protocol)])
    with pytest.raises(PromptError, match=r"(messages|input)\[2\]\.(content(\[0\]\.content)?|output)\[1\] is an image"):
        endpoint_of(protocol, vision=False).parse(body, None)
    call = endpoint_of(protocol, vision=False, without_vision="note").parse(body, None)
    assert IMAGE_LEFT_OUT in tokenizer_of("deepseek_v4").decode(call.prompt.ids_T.tolist()) and call.images == 0


UNKNOWN = {
    "chat": [
        ({"foo": 1, "bar": 2}, "foo is not a known field; "),
        ({"max_token": 1}, "did you mean max_tokens?"),
        ({"functions": [{}], "audio": {}}, "but as []; leave it out; audio is not available"),
        ({"content": [{"type": "image_urll"}]}, r"messages[0].content[0] has the unknown type 'image_urll'"),
        ({"content": [{"type": "input_audio", "input_audio": {}}]}, "unknown type 'input_audio'"),
        ({"content": [{"type": "file", "file": {"file_id": "f"}}]}, "unknown type 'file'"),
        ({"content": [{"type": "text", "text": "a", "texts": "b"}]}, "content[0].texts is not a known field"),
        ({"messages": [{"role": "user", "content": "a", "tools": [1]}]}, "messages[0].tools is not available"),
        ({"messages": [{"role": "user", "content": "a"}, 3]}, "messages[1] must be an object"),
        ({"messages": []}, "messages is empty"),
        ({"messages": None}, "messages must be a list"),
        ({"n": 0}, "n is 0, expected"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls is 'no', expected true or false"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage is not a known field"),
        ({"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}}, "did you mean schema"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_logprobs": 3}, "logprobs must be set to true"),
        *(({"logit_bias": {key: 1}}, "the digits of a token id") for key in ("x", "1_0", " 1", "+1", "\u0661")),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1, "01": 2}}, "names the token 1 twice"),
        ({"modalities": ["text", "audio"]}, "modalities is not available on this server but as ['text']"),
        ({"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "high"}, "needs thinking"),
        ({"reasoning_effort": "huge"}, "reasoning_effort is 'huge', expected one of none"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] is of type 'web_search', which this server does not run"),
        ({"tools": [{"type": "function", "function": {"name": "a", "params": {}}}]}, "tools[0].function.params"),
        ({"tools": {"look": ENDLESS}, "tool_choice": "required"}, "parameter 'more' has no value that ends"),
        ({"tools": {"look": PATH}, "guided_json": ENDLESS}, "the schema of the answer has no value that ends"),
        ({"tools": {"look": PATH}, "guided_regex": "a", "tool_choice": "required", "thinking": True},
         "cannot be had with these tools"),
        ({"tools": {"look": PATH}, "tool_choice": {"type": "function", "function": {"name": "no"}}, "thinking": True},
         "no function named 'no'"),
        ({"tools": {"look": PATH}, "guided_regex": "a"}, "cannot be had with these tools"),
        ({"tools": {"look": PATH}, "guided_json": {}, "tool_choice": "required"}, "cannot be had with these tools"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "more than one format"),
        ({"structured_outputs": {"jsn": {}}}, "did you mean json"),
        ({"guided_json": "{"}, "is text that is not JSON"),
        ({"guided_json": '{"type": "object", "type": "string"}'}, "'type' is written twice"),
    ],
    "responses": [
        ({"foo": 1, "bar": 2}, "foo is not a known field; "),
        ({"previous_response_id": "r"}, "previous_response_id is not available"),
        ({"stream": "yes"}, "stream is 'yes', expected true or false"),
        ({"background": True}, "background is not available on this server but as False"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0] has the unknown type 'item_reference'"),
        ({"content": [{"type": "input_file", "file_id": "f"}]}, "unknown type 'input_file'"),
        ({"content": [{"type": "input_image", "file_id": "f"}]}, "content[0].file_id is not available"),
        ({"input": [{"role": "assistant", "content": [picture("responses")]}]}, "images go to system, user, tool"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] is of type 'web_search', which this server does not run"),
        ({"include": ["file_search_call.results"]}, "include has 'file_search_call.results'"),
        ({"truncation": "middle"}, "truncation is not available"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type is 'grammar'"),
    ],
    "messages": [
        ({"foo": 1, "bar": 2}, "foo is not a known field; "),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"stream": 1}, "stream is '1', expected true or false"),
        ({"content": [{"type": "document", "source": {"type": "url"}}]}, "content[0].source.type is 'url'; documents"),
        ({"content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}, "source.file_id is not a known"),
        ({"content": [{"type": "image", "source": {"type": "blob"}}]}, "sources are base64 and url"),
        ({"tools": [{"type": "web_search_2", "name": "web_search", "max_uses": 5}]}, "this server does not run"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not available"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "thinking": True},
         "continues a message cannot be had with thinking"),
        ({"output_config": {"format": {"type": "xml"}}}, "must have type json_schema"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("protocol", "body", "why"), [(p, body, why) for p, rows in UNKNOWN.items() for body, why in rows]
)
def test_what_is_not_to_be_had_is_refused_by_name(protocol: ChatProtocol, body: dict[str, Any], why: str) -> None:
    if isinstance(body.get("tools"), list):
        extra = {**body}
        tools = extra.pop("tools")
        with pytest.raises(PromptError) as caught:
            endpoint_of(protocol, strict_fields=True).parse({**body_of(protocol, **extra), "tools": tools}, None)
        assert why in str(caught.value)
    else:
        assert why in refusal(protocol, **body)


def test_an_unknown_model_is_not_served_and_an_adapter_is_chosen_by_name() -> None:
    with pytest.raises(NotServedError, match="model 'gpt' is not served here; served are tiny"):
        endpoint_of("chat").parse(body_of("chat", model="gpt"), None)
    call = endpoint_of("chat", adapter_names=lambda: ("mine",)).parse(body_of("chat", model="mine"), None)
    assert (call.model, call.adapter) == ("mine", "mine")
    assert call_of("chat").model == "tiny" and call_of("chat").adapter is None


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sampling_fields_reach_the_sampler_as_they_were_stated(protocol: ChatProtocol) -> None:
    """Also while thinking, where the library would put its own values."""
    for thinking in (False, True):
        stated = {"temperature": 0.3, "top_p": 0.4, "top_k": 5, "min_p": 0.1, "seed": 7, "stop_token_ids": [3]}
        limit = {"chat": "max_completion_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}[protocol]
        stop = {"messages": "stop_sequences"}.get(protocol, "stop")
        (params,) = call_of(protocol, thinking=thinking, **{**stated, limit: 9, stop: ["zz"]}).params
        assert dataclasses.asdict(params) | {**stated, "stop_token_ids": (3,)} == dataclasses.asdict(params)
        assert (params.max_tokens, params.stop) == (9, ("zz",))
        assert params.stop_after == ("</think>" if thinking else None)


def same_conversation(protocol: ChatProtocol, thinking: bool) -> dict[str, Any]:
    """System text, reasoning, a call, its result with a picture and a last question, in a protocol's own words."""
    body = body_of(protocol, tools={"look": PATH}, thinking=thinking)
    result = [words(protocol, "there"), picture(protocol)]
    if protocol == "responses":
        items = [
            {"role": "user", "content": "Where?"},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"path": "/x"}'},
            {"type": "function_call_output", "call_id": "c", "output": result},
        ]
        return body | {"instructions": "Be terse.", "input": items}
    if protocol == "messages":
        blocks = [{"type": "thinking", "thinking": "hm", "signature": "s"}]
        blocks += [{"type": "tool_use", "id": "c", "name": "look", "input": {"path": "/x"}}]  # type: ignore[dict-item]
        turns = [
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": result}]},
        ]
        effort = {"output_config": {"effort": "low"}} if thinking else {}
        return body | {"system": "Be terse.", "messages": turns} | effort
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"path": "/x"}'}}
    turns = [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": result},
    ]
    return body | {"messages": turns} | ({"reasoning_effort": "low"} if thinking else {})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("thinking", [False, True])
def test_one_conversation_is_one_prompt_in_all_protocols(family: Family, thinking: bool) -> None:
    calls = [endpoint_of(p, family).parse(same_conversation(p, thinking), None) for p in PROTOCOLS]
    ids = [call.prompt.ids_T.tolist() for call in calls]
    assert ids[0] == ids[1] == ids[2] and -1 in ids[0]
    assert len({call.prompt.digests for call in calls}) == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tools_that_may_not_be_called_are_not_shown(protocol: ChatProtocol) -> None:
    none: Any = {"type": "none"} if protocol == "messages" else "none"
    hidden = call_of(protocol, tools={"look": PATH}, tool_choice=none)
    assert hidden.prompt.ids_T.tolist() == call_of(protocol).prompt.ids_T.tolist()
    assert call_of(protocol, tools={"look": PATH}, tool_choice=none, guided_regex="a").params[0].structured is not None


def test_a_developer_is_the_system_and_reasoning_has_two_names() -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning": "because"}]
    body = {"tools": {"look": PATH}, "thinking": True}
    for role, name in (("system", "reasoning_content"), ("developer", "reasoning")):
        spoken = [{"role": role, "content": "S"}, turns[0], {"role": "assistant", "content": "a", name: "because"}]
        prompt = call_of("chat", messages=[*spoken, turns[0]], **body).prompt
        assert "because" in tokenizer_of("deepseek_v4").decode(prompt.ids_T.tolist())


def test_several_answers_have_seeds_of_their_own() -> None:
    call = call_of("chat", n=3, seed=5, logprobs=True, top_logprobs=2, logit_bias={"7": -5}, frequency_penalty=1)
    assert [params.seed for params in call.params] == [5, 6, 7]
    assert all((p.logprobs, p.logit_bias, p.frequency_penalty) == (2, {7: -5}, 1) for p in call.params)
    assert [params.seed for params in call_of("chat", n=2).params] == [None, None]


def test_an_answer_without_a_stated_length_has_the_makers_default() -> None:
    assert call_of("chat").params[0].max_tokens == 8192
    assert call_of("chat", thinking=True).params[0].max_tokens == 65536
    assert call_of("chat", reasoning_effort="max").params[0].max_tokens == 131072
    assert call_of("chat", max_tokens=3, max_completion_tokens=4).params[0].max_tokens == 4


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMS: list[tuple[ChatProtocol, dict[str, Any], Structured]] = [
    ("chat", {"content": "as json", "response_format": {"type": "json_object"}}, Structured(kind="json")),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
     Structured(kind="json_schema", value=SCHEMA)),
    ("chat", {"response_format": {"type": "regex", "regex": "a+"}}, Structured(kind="regex", value="a+")),
    ("chat", {"guided_json": json.dumps(SCHEMA)}, Structured(kind="json_schema", value=SCHEMA)),
    ("chat", {"guided_choice": ["a", "b"]}, Structured(kind="choice", value=("a", "b"))),
    ("chat", {"structured_outputs": {"grammar": 'start: "a"'}}, Structured(kind="grammar", value='start: "a"')),
    ("chat", {"structured_outputs": {"json_object": True}}, Structured(kind="json")),
    ("chat", {"guided_regex": "a", "thinking": True}, Structured(kind="regex", value="a", after="</think>")),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
     Structured(kind="json_schema", value=SCHEMA)),
    ("messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
     Structured(kind="json_schema", value=SCHEMA)),
    ("messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}, "thinking": True},
     Structured(kind="json_schema", value=SCHEMA, after="</think>")),
]  # fmt: skip


@pytest.mark.parametrize(("protocol", "body", "form"), FORMS)
def test_a_form_of_answer_reaches_the_engine(protocol: ChatProtocol, body: dict[str, Any], form: Structured) -> None:
    call = call_of(protocol, **body)
    assert call.params[0].structured == form
    if form.kind == "json_schema" and "guided_json" not in body:
        text = tokenizer_of("deepseek_v4").decode(call.prompt.ids_T.tolist())
        assert json.dumps(SCHEMA) in text, "the model is told too"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_fields_without_effect_are_named(protocol: ChatProtocol) -> None:
    assert call_of(protocol, metadata={"a": "b"}, service_tier="auto").ignored[:2] == ("metadata", "service_tier")
    assert call_of(protocol, metadata=None).ignored == ()


def test_a_message_of_the_assistant_at_the_end_is_continued_in_messages() -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "It is"}]
    prompt = call_of("messages", messages=turns).prompt
    assert tokenizer_of("deepseek_v4").decode(prompt.ids_T.tolist()).endswith("</think>It is")


@pytest.mark.parametrize("asked", [*PROTOCOLS, "completions", "tokenize", "tokenize chat"])
def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten megabytes would take a quarter of a minute and gigabytes; and many small parts are as long as a large one."""
    monkeypatch.setattr("spyglass.prompt.PromptTokenizer.encode_text", lambda *_: pytest.fail("it was tokenised"))
    text = "word " * 1_000_000
    if asked in ("completions", "tokenize"):
        kind: Any = CompletionsEndpoint if asked == "completions" else Tokenize
        endpoint, body = kind(served_of()), {"prompt": 2 * text}
    else:
        protocol: ChatProtocol = "chat" if asked == "tokenize chat" else asked
        endpoint = Tokenize(served_of()) if asked == "tokenize chat" else endpoint_of(protocol)
        body = body_of(protocol, content=[words(protocol, text)] * 2)
    with pytest.raises(CapacityError, match=r"prompt is too long: 4097 tokens > 4096 maximum \(at least\)"):
        endpoint.parse(body, None)
