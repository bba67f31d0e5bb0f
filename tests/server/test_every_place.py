"""One place of a sound body changed, every place in turn: a request is honoured or refused by name, never lost."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from spyglass.errors import NotServedError, PromptError
from spyglass.server.errors import error_response
from spyglass.server.exchange import Call, Endpoint
from spyglass.server.protocols.endpoints import make_endpoints
from tests.server.protocol_parts import PATH, URL, served_of

FORM = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
DATA = {"type": "base64", "media_type": "image/png", "data": URL.split(",", 1)[1]}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"path": "/x"}'}}
CHAT_TOOL = {"type": "function", "function": {"name": "look", "description": "d", "strict": False, "parameters": PATH}}
TOOL = {"type": "function", "name": "look", "description": "d", "strict": False, "parameters": PATH}
CUSTOM = {"name": "look", "description": "d", "input_schema": PATH, "cache_control": {"type": "ephemeral"}}
OLLAMA_CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"path": "x"}}}
USER = [{"role": "user", "content": "hi"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {
        "model": "tiny", "tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}},
        "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4, "logit_bias": {"5": 1.0},
        "stop": ["x"], "thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": False},
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [
                {"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
            ]},
            {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "res"},
        ],
    }),
    ("/v1/chat/completions", {
        "messages": USER, "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": FORM}},
    }),
    ("/v1/chat/completions", {"messages": USER, "structured_outputs": {"choice": ["a", "b"]}, "n": 2, "seed": 1}),
    ("/v1/responses", {
        "model": "tiny", "instructions": "i", "tools": [TOOL], "tool_choice": "auto", "top_logprobs": 1,
        "reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": {"type": "text"}},
        "include": ["message.output_text.logprobs"],
        "input": [
            {"type": "message", "role": "user", "content": [
                {"type": "input_text", "text": "hi"}, {"type": "input_image", "image_url": URL, "detail": "auto"},
            ]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
        ],
    }),
    ("/v1/responses", {
        "input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": FORM, "strict": True}},
    }),
    ("/v1/responses", {"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "look"}}),
    ("/v1/messages", {
        "model": "tiny", "max_tokens": 4, "system": [{"type": "text", "text": "s"}], "tools": [CUSTOM],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "stop_sequences": ["x"],
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image", "source": DATA}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "c", "name": "look", "input": {"path": "x"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]},
            ]},
        ],
    }),
    ("/v1/messages", {
        "max_tokens": 4, "messages": USER,
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": FORM}},
    }),
    ("/v1/messages", {
        "max_tokens": 4, "messages": USER, "tools": [CUSTOM], "tool_choice": {"type": "tool", "name": "look"},
    }),
    ("/api/chat", {
        "model": "tiny", "stream": True, "tools": [CHAT_TOOL], "keep_alive": "5m",
        "options": {"temperature": 0.5, "top_k": 3, "seed": 1, "num_predict": 4, "stop": ["x"], "num_ctx": 10},
        "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": "hi", "images": [URL.split(",")[1]]},
            {"role": "assistant", "content": "a", "thinking": "t", "tool_calls": [OLLAMA_CALL]},
            {"role": "tool", "tool_name": "look", "content": "res"},
        ],
    }),
    ("/api/generate", {"model": "tiny", "prompt": "hi", "think": "low", "images": [URL], "format": "json"}),
    ("/api/generate", {"model": "tiny", "prompt": "hi", "raw": True, "stream": False}),
    ("/v1/completions", {
        "prompt": [1, 2, 3], "max_tokens": 4, "echo": True, "logprobs": 2, "stream_options": {"include_usage": True},
    }),
]  # fmt: skip
VALUES: list[Any] = [True, False, 0, -1, 1 << 100, 1.5, "", "x", [], ["a"], [[]], [{}], [None], {}, {"type": []}, None]
# objects whose fields are the client's own business: schemas, arguments, notes, biases by token
FREE = {"parameters", "input_schema", "schema", "metadata", "cache_control", "logit_bias", "input", "arguments"}
Place = tuple[str | int, ...]


@pytest.fixture(scope="module")
def endpoints() -> dict[str, Endpoint]:
    return {endpoint.path: endpoint for endpoint in make_endpoints(served_of())}


@pytest.fixture(scope="module")
def strict() -> dict[str, Endpoint]:
    return {endpoint.path: endpoint for endpoint in make_endpoints(served_of(strict_fields=True))}


def places(value: Any, here: Place = ()) -> Iterator[Place]:
    """Every place of a body but the body itself."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*here, key)
        yield from places(item, (*here, key))


def changed(body: Any, place: Place, value: Any) -> Any:
    body = copy.deepcopy(body)
    inner = body
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return body


def at(body: Any, place: Place) -> Any:
    for key in place:
        body = body[key]
    return body


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_no_change_of_a_sound_body_is_a_fault_of_ours(
    path: str, body: dict[str, Any], endpoints: dict[str, Endpoint]
) -> None:
    endpoints[path].parse(body, None)
    for place in places(body):
        for value in VALUES:
            try:
                endpoints[path].parse(changed(body, place, value), None)
            except (PromptError, NotServedError) as error:
                assert str(error), (place, value)


NAMED = re.compile(r"\b[a-z_]+(?:\[\d+\]|\.[a-z_]+)+")  # a place in words


def is_place(body: Any, named: str, known: Collection[str]) -> bool:
    """Whether a place is one of a body, or of a field that could be where it names it."""
    keys = re.findall(r"[^.\[\]]+", named)
    if keys[0] not in {*body, *known}:
        return False
    for number, key in enumerate(keys):
        if isinstance(body, list):
            if not key.isdigit() or int(key) >= len(body):
                return False
            body = body[int(key)]
        elif not isinstance(body, dict) or key not in body:
            return isinstance(body, dict) and number == len(keys) - 1  # it is missing there
        else:
            body = body[key]
    return True


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_place_that_a_refusal_names_is_in_the_words_of_the_request(
    path: str, body: dict[str, Any], endpoints: dict[str, Endpoint]
) -> None:
    for place in places(body):
        for value in (*VALUES, "x" * 400_000):
            sent = changed(body, place, value)
            try:
                endpoints[path].parse(sent, None)
            except (PromptError, NotServedError) as error:
                told = error_response(error)
                named = {*NAMED.findall(told.message), *([told.field] if told.field else [])}
                wrong = [one for one in named if not is_place(sent, one, endpoints[path].fields.read)]
                assert not wrong, (place, str(value)[:50], told.message[:200])


def test_limits_are_named_as_the_request_has_them(endpoints: dict[str, Endpoint]) -> None:
    for path, more, named in [
        ("/v1/chat/completions", {"messages": USER, "max_completion_tokens": "x"}, "max_completion_tokens"),
        ("/v1/chat/completions", {"messages": USER, "max_tokens": "x"}, "max_tokens"),
        ("/v1/responses", {"input": "x", "max_tokens": "x"}, "max_tokens"),
        ("/v1/responses", {"input": "x", "max_output_tokens": "x"}, "max_output_tokens"),
        ("/v1/responses", {"input": "x", "top_logprobs": 20, "max_output_tokens": 10**6}, "top_logprobs"),
        ("/v1/responses", {"input": "x" * 400_000}, "input"),
        ("/api/generate", {"model": "tiny", "prompt": "x" * 400_000}, "prompt"),
        ("/api/chat", {"model": "tiny", "messages": USER, "options": {"num_predict": "x"}}, "options.num_predict"),
        ("/api/generate", {"model": "tiny", "images": ["?"]}, "images[0]"),
    ]:
        with pytest.raises(PromptError) as caught:
            endpoints[path].parse(more, None)
        told = error_response(caught.value)
        assert named in (told.field, *NAMED.findall(told.message)), told


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_an_unknown_field_anywhere_is_ignored_and_named_or_refused_where_fields_are_strict(
    path: str, body: dict[str, Any], endpoints: dict[str, Endpoint], strict: dict[str, Endpoint]
) -> None:
    for place in [(), *places(body)]:
        own = place[1:] if place[:1] == ("input",) else place  # there it is the conversation of Responses
        if not isinstance(at(body, place), dict) or FREE.intersection(own):
            continue
        more = changed(body, (*place, "unheard_of"), 1)
        with pytest.raises(PromptError, match="unheard_of"):
            strict[path].parse(more, None)
        assert any("unheard_of" in name for name in endpoints[path].parse(more, None).ignored)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_flag_is_true_or_false_and_nothing_like_it(
    path: str, body: dict[str, Any], endpoints: dict[str, Endpoint]
) -> None:
    for place in places(body):
        if isinstance(at(body, place), bool) and not any(key in FREE for key in place):
            for value in ("true", "false", 1, 0, [], {}):
                with pytest.raises(PromptError):
                    endpoints[path].parse(changed(body, place, value), None)


@pytest.mark.parametrize(
    ("path", "more", "why"),
    [
        ("/v1/chat/completions", {"messages": USER, "tool_choice": "required"}, "no tools"),
        ("/v1/responses", {"input": "x", "tool_choice": "required"}, "no tools"),
        ("/v1/messages", {"messages": USER, "max_tokens": 1, "tool_choice": {"type": "any"}}, "no tools"),
        ("/v1/completions", {"prompt": [1, True]}, "flat list of integer token ids"),
        ("/v1/completions", {"prompt": "x", "stop": {"a": 1}}, "expected a list"),
        ("/v1/completions", {"prompt": "x", "guided_choice": "yes"}, "expected a list"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": ""}, "expected a list"),
        ("/v1/completions", {"prompt": "x", "best_of": True}, "best_of"),
    ],
)
def test_what_looks_right_and_is_not_is_refused(
    path: str, more: dict[str, Any], why: str, endpoints: dict[str, Endpoint]
) -> None:
    with pytest.raises(PromptError, match=why):
        endpoints[path].parse(more, None)


def test_a_parameter_of_any_kind_may_be_called_for(endpoints: dict[str, Endpoint]) -> None:
    properties: dict[str, Any] = {"path": True}
    tool = {**CUSTOM, "input_schema": {"type": "object", "properties": properties, "required": ["path"]}}
    body = {"messages": USER, "max_tokens": 1, "tools": [tool], "tool_choice": {"type": "any"}}
    call = endpoints["/v1/messages"].parse(body, None)
    assert isinstance(call, Call) and call.params[0].structured is not None
    assert '%json {"x-guidance"' in call.params[0].structured.value
    properties["path"] = False
    with pytest.raises(PromptError, match="no value fits"):
        endpoints["/v1/messages"].parse(body, None)
