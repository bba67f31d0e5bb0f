"""What people's own clients send: shapes that locked them out, each named after the rule that lets them in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spyglass.engine.llm import LLM
from spyglass.errors import PromptError
from spyglass.server.errors import error_response
from spyglass.server.exchange import Call
from spyglass.server.parsing import prepared
from spyglass.server.protocols.completions import CompletionsEndpoint
from tests.server.protocol_parts import (
    PATH,
    PROTOCOLS,
    URL,
    ChatProtocol,
    body_of,
    call_of,
    endpoint_of,
    output,
    said_whole,
    served_of,
    stream_of,
    tokenizer_of,
    whole_of,
)

USER = [{"role": "user", "content": "hi"}]
LOOK = {"type": "function", "function": {"name": "look", "parameters": PATH}}
CALLED = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def chat(**body: Any) -> Call:
    call = endpoint_of("chat").parse({"messages": USER, **body}, None)
    assert isinstance(call, Call)
    return call


def responses(**body: Any) -> Call:
    call = endpoint_of("responses").parse({"input": "hi", **body}, None)
    assert isinstance(call, Call)
    return call


def shown(call: Call) -> str:
    """The prompt as text."""
    return tokenizer_of("deepseek_v4").decode(call.prompt.ids_T.tolist())


def refusal(protocol: ChatProtocol, **body: Any) -> tuple[str, str | None]:
    """Words and place of an error."""
    with pytest.raises(PromptError) as caught:
        endpoint_of(protocol).parse({**body_of(protocol), **body}, None)
    response = error_response(caught.value)
    return response.message, response.field


# A: fields


@pytest.mark.parametrize("value", [{}, {"edits": []}, {"edits": [{"type": "clear_tool_uses_20250919"}]}])
def test_a1_context_management_is_ignored_and_named(value: Any) -> None:
    assert "context_management" in call_of("messages", context_management=value).ignored


def test_a2_what_codex_adds_is_ignored_and_its_tools_are_functions_or_left_out() -> None:
    function = {"type": "function", "name": "run", "parameters": PATH, "strict": False}
    tools = [
        function,
        {"type": "namespace", "name": "mcp", "tools": [function]},
        *({"type": kind, "name": kind} for kind in ("web_search", "custom", "local_shell", "image_generation")),
        {"type": "tool_search", "execution": "client"},
    ]
    more = {"client_metadata": {"a": "b"}, "access_programs": [], "tools": tools, "include": ["web_search_call.action"]}
    call = responses(**more)
    assert list(call.tools) == ["run", "mcp::run"] and '"name": "mcp::run"' in shown(call)
    for name in ("client_metadata", "access_programs", "tools[] (web_search)", "tools[] (custom)"):
        assert name in call.ignored
    text, place = refusal("responses", tools=tools, tool_choice={"type": "web_search"})
    assert "'web_search', which this server does not run" in text and place == "tool_choice"


def test_a2_a_call_into_a_namespace_is_told_with_its_namespace() -> None:
    tools = [{"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "run", "parameters": PATH}]}]
    said = '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="mcp::run">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    (item,) = whole_of(responses(tools=tools), output(said))["output"]
    assert (item["namespace"], item["name"], item["arguments"]) == ("mcp", "run", "{}")
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "o"}
    back = [{"role": "user", "content": "q"}, item, result]
    assert 'invoke name="mcp::run"' in shown(responses(input=back, tools=tools))


def test_a2_items_of_other_tools_in_a_history_are_calls_or_words() -> None:
    items = [
        {"role": "user", "content": "q", "internal_chat_message_metadata_passthrough": {"a": 1}},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done!"},
        {"type": "local_shell_call", "call_id": "c2", "status": "completed", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c2", "output": "a.txt"},
        {"type": "shell_call", "call_id": "c3", "action": {"commands": ["wc -l"]}},
        {"type": "shell_call_output", "call_id": "c3", "output": [{"stdout": "7 lines", "stderr": ""}]},
        {"type": "apply_patch_call", "call_id": "c4", "operation": {"type": "update_file"}},
        {"type": "apply_patch_call_output", "call_id": "c4", "output": "ok"},
        {"type": "mcp_approval_request", "id": "m", "name": "github"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "owls"}},
        {"type": "image_generation_call", "id": "i", "status": "completed", "result": "aGVsbG8="},
        {"role": "user", "content": "go on"},
    ]
    text = shown(responses(input=items))
    for part in ("*** Begin", "Done!", "ls", "a.txt", "owls", "go on", "wc -l", "7 lines", "update_file", "github"):
        assert part in text
    assert "aGVsbG8=" not in text


def test_a3_a_load_generators_options_are_honoured() -> None:
    call = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    events = stream_of(call, ["a", "b"], output("ab", [5, 6]))
    assert all(event["usage"]["prompt_tokens"] == len(call.prompt) for event in events)
    body = {"prompt": "a", "max_tokens": 3, "max_completion_tokens": 3}
    assert CompletionsEndpoint(served_of()).parse(body, None).params[0].max_tokens == 3


NEUTRAL = {
    "skip_special_tokens": True, "include_stop_str_in_output": False, "use_beam_search": False,
    "best_of": 1, "echo": False, "add_generation_prompt": True, "length_penalty": 1.0, "return_token_ids": False,
    "separate_reasoning": True, "guided_decoding_backend": "xgrammar", "mm_processor_kwargs": {}, "priority": 0,
    "cache_prompt": True, "spaces_between_special_tokens": True, "n_probs": 0, "bad_words": [], "documents": [],
}  # fmt: skip
CHANGING = {
    "json_schema": {"type": "object"}, "format": "json", "n_predict": 5,
    "skip_special_tokens": False, "include_stop_str_in_output": True, "use_beam_search": True, "best_of": 4,
    "length_penalty": 0.5, "allowed_token_ids": [5], "bad_words": ["x"], "xtc_probability": 0.5, "repeat_penalty": 1.1,
}  # fmt: skip


def test_a4_other_engines_fields_are_ignored_at_their_neutral_value_and_refused_all_at_once_elsewhere() -> None:
    call = chat(**NEUTRAL, min_tokens=0)
    assert set(call.ignored) == set(NEUTRAL) and chat(min_tokens=3).params[0].min_tokens == 3
    text, place = refusal("chat", **CHANGING)
    assert all(name in text for name in CHANGING) and place == next(iter(CHANGING))


def test_a5_minus_one_means_none() -> None:
    params = chat(top_k=-1, seed=-1, max_tokens=-1, stop="", logit_bias=[]).params[0]
    assert (params.top_k, params.seed, params.stop, params.logit_bias) == (0, None, (), {})
    assert params.max_tokens == chat().params[0].max_tokens


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "schema",
    [None, {}, [], {"type": "object", "properties": None}, {"type": "object"}, {"properties": {}}, {"properties": []},
     {"type": ["object", "null"]}],
)  # fmt: skip
def test_a6_a_tool_without_parameters_may_say_so_in_any_way(protocol: ChatProtocol, schema: Any) -> None:
    forced: Any = {"messages": {"type": "any"}}.get(protocol, "required")
    for choice in ({}, {"tool_choice": forced}):
        assert list(call_of(protocol, tools={"now": schema}, **choice).tools) == ["now"]


def test_a7_histories_of_other_servers_are_taken() -> None:
    def called(call_id: str, arguments: Any) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}

    messages = [
        {"role": "user", "content": "q", "id": "1", "timestamp": 5},
        {"role": "assistant", "content": "a", "tool_calls": [], "reasoning_details": [{}], "refusal": None},
        {"role": "assistant", "content": None, "tool_calls": [called("c", None)]},
        {"role": "tool", "content": None},
        {"role": "assistant", "tool_calls": [called("d", {"path": "/y"})]},
        {"role": "tool", "tool_call_id": "d", "name": "look", "content": "seen"},
        {"role": "user", "content": "go on"},
    ]  # fmt: skip
    text = shown(chat(messages=messages, tools=[LOOK]))
    assert "/y" in text and "seen" in text and "go on" in text


def test_a7_functions_are_what_tools_were_first_called() -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"path": "/y"}'}},
        {"role": "function", "name": "look", "content": "seen"},
    ]
    text = shown(chat(messages=messages, tools=[LOOK]))
    assert 'invoke name="look"' in text and "/y" in text and "seen" in text


def test_a7_parts_by_their_names_in_the_other_protocol_are_the_same_parts() -> None:
    theirs = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": URL, "detail": "auto"}]
    ours = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": URL}}]
    chats = [chat(messages=[{"role": "user", "content": content}]) for content in (theirs, ours)]
    others = [responses(input=[{"role": "user", "content": content}]) for content in (theirs, ours)]
    for one, other in (chats, others):
        assert one.images == 1 and one.prompt.ids_T.tolist() == other.prompt.ids_T.tolist()
    tool = {"type": "function", "function": {"name": "look", "parameters": PATH}}
    assert shown(responses(tools=[tool])) == shown(responses(tools=[{"type": "function", **tool["function"]}]))


def test_a7_how_much_a_model_reasons_may_be_said_as_routers_of_many_models_say_it() -> None:
    for said in ({"reasoning": {"enabled": True}}, {"enable_thinking": True}, {"reasoning": {"effort": "high"}}):
        assert shown(chat(**said)) == shown(chat(thinking={"type": "enabled"}))
    assert shown(chat(reasoning={"effort": "none"}, enable_thinking=False)) == shown(chat())


def test_a7_arguments_as_text_and_contents_of_no_blocks_are_what_they_mean() -> None:
    def told(arguments: Any, content: Any) -> str:
        used = {"type": "tool_use", "id": "a", "name": "look", "input": arguments}
        result = {"type": "tool_result", "tool_use_id": "a", "content": content}
        history = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
        call = endpoint_of("messages").parse({**body_of("messages"), "messages": [*USER, *history]}, None)
        assert isinstance(call, Call)
        return shown(call)

    assert told('{"path": "/y"}', []) == told({"path": "/y"}, "") and told("", None) == told({}, "")


def test_a8_cache_control_is_ignored_everywhere() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    content = [{"type": "text", "text": "hi", **mark}]
    tool = {"type": "function", "function": {"name": "look", "parameters": PATH, **mark}, **mark}
    call = chat(messages=[{"role": "user", "content": content, **mark}], tools=[tool])
    assert shown(call) == shown(chat(messages=[{"role": "user", "content": "hi"}], tools=[LOOK]))


def test_a9_predefined_tools_that_the_client_runs_are_functions_and_others_are_left_out() -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 10_000},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    ]
    call = endpoint_of("messages").parse({**body_of("messages"), "tools": tools}, None)
    assert list(call.tools) == ["bash", "str_replace_based_edit_tool"]
    assert "tools[] (web_search_20250305)" in call.ignored
    text, _ = refusal("messages", tools=tools, tool_choice={"type": "tool", "name": "web_search"})
    assert "which this server does not run" in text


def test_a10_a_document_with_text_is_its_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Once upon a time."}
    block = {"type": "document", "title": "A tale", "source": source, "citations": {"enabled": False}}
    text = shown(call_of("messages", content=[block, {"type": "text", "text": "Who?"}]))
    assert "A tale" in text and "Once upon a time." in text and "Who?" in text


def test_a11_a_suffix_fills_in_the_middle_by_the_tokenizers_marks() -> None:
    endpoint = CompletionsEndpoint(served_of())
    call = endpoint.parse({"prompt": "def f():\n", "suffix": "\n    return x"}, None)
    assert shown(call).endswith("<｜fim▁begin｜>def f():\n<｜fim▁hole｜>\n    return x<｜fim▁end｜>")
    assert shown(endpoint.parse({"prompt": "a", "suffix": ""}, None)) == shown(endpoint.parse({"prompt": "a"}, None))


# C: errors


def test_c1_a_prompt_that_is_too_long_has_the_code_and_the_words_that_programs_look_for() -> None:
    words = "word " * 5000
    for protocol in PROTOCOLS:
        with pytest.raises(PromptError) as caught:
            endpoint_of(protocol).parse(body_of(protocol, content=words), None)
        response = error_response(caught.value)
        assert response.code == "context_length_exceeded"
        assert "maximum context length is 4096 tokens" in response.message
        assert response.message.startswith("prompt is too long: 50") and "tokens > 4096 maximum" in response.message
        body = endpoint_of(protocol).error(400, response.message, field=response.field, code=response.code)
        assert protocol == "messages" or body["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([*USER, {"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "look", "arguments": 5}}]}],
         "messages[1].tool_calls[0].function.arguments"),
        ([*USER, {"role": "assistant", "tool_calls": [{**CALLED, "function": {"arguments": "{}"}}]}],
         "messages[1].tool_calls[0].function.name"),
        ([*USER, {"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
        ([*USER, {"role": "tool", "tool_call_id": 5, "content": "x"}], "messages[1].tool_call_id"),
        ([*USER, {"role": "user", "content": 5}], "messages[1].content"),
        ([*USER, {"role": "narrator", "content": "x"}], "messages[1].role"),
        ([*USER, {"content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([*USER, {"role": "tool", "tool_call_id": "c", "content": [{"type": "imag"}]}], "messages[1].content[0]"),
        ([], "messages"),
    ],
)  # fmt: skip
def test_c2_errors_of_a_long_history_name_the_place(messages: Any, place: str) -> None:
    text, field = refusal("chat", messages=messages)
    assert field == place and place in text
    assert "cannot be rendered" not in text


def test_c3_a_sampling_value_out_of_range_is_told_as_what_it_is() -> None:
    for protocol in PROTOCOLS:
        text, place = refusal(protocol, temperature=-1)
        assert text.startswith("temperature is -1") and place == "temperature"


def test_c4_an_option_of_the_server_is_told_as_such() -> None:
    response = error_response(PromptError("the prompt has 3 images; send fewer, or raise images"))
    assert response.message.endswith("or raise images, an option of the server,")


# E: markup


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_e1_what_stands_around_calls_in_any_wrapper_is_content(protocol: ChatProtocol) -> None:
    def wrapped(word: str, path: str) -> str:
        inner = f'<｜DSML｜parameter name="path" string="true">{path}</｜DSML｜parameter>'
        call = f'<｜DSML｜invoke name="look">\n{inner}\n</｜DSML｜invoke>'
        return f"\n\n<｜DSML｜{word}>\n{call}\n</｜DSML｜{word}>"

    answer = output(f"I look.{wrapped('function_calls', '/a')} And{wrapped('tool_calls', '/b')} Done.", [5, 6])
    said = said_whole(protocol, whole_of(call_of(protocol, tools={"look": PATH}), answer))
    assert [json.loads(arguments) for _, arguments in said.calls] == [{"path": "/a"}, {"path": "/b"}]
    assert "DSML" not in said.content
    assert all(word in said.content for word in ("I look.", " And", " Done."))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_e2_an_answer_that_said_nothing_is_marked(protocol: ChatProtocol) -> None:
    finished = output("I think.</think>", [5, 6])
    whole = whole_of(call_of(protocol, thinking=True), finished)
    events = stream_of(call_of(protocol, thinking=True, stream=True), ["I think.", "</think>"], finished)
    assert json.dumps(whole).count('"empty": true') == 1 and json.dumps(events).count('"empty": true') == 1
    full = whole_of(call_of(protocol, thinking=True), output("I think.</think>Yes.", [5, 6]))
    assert "empty" not in json.dumps(full)


# B: structured output and tools


MOMENT = {"type": "object", "properties": {"at": {"type": "string", "format": "date-time"}}, "required": ["at"]}
SIDE = {
    "type": "object",
    "properties": {"side": {"$ref": "#/$defs/Side"}},
    "$defs": {"Side": {"type": "string", "enum": ["left", "right"]}},
    "required": ["side"],
    "additionalProperties": False,
}


def strict_tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": schema, "strict": True}}


def test_b1_strict_takes_the_formats_of_dates(llm: LLM) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "m", "schema": MOMENT, "strict": True}}
    prepared(chat(response_format=form), llm.engine.prepare)
    for choice in ("auto", "required"):
        prepared(chat(tools=[strict_tool(MOMENT)], tool_choice=choice), llm.engine.prepare)


def test_b1_a_schema_may_stand_where_other_servers_have_it() -> None:
    for form in ({"json_schema": {"schema": MOMENT}}, {"schema": MOMENT}):
        (params,) = chat(response_format={"type": "json_schema", **form}).params
        assert params.structured is not None and params.structured.value == MOMENT


def test_b1_an_answer_that_must_be_a_call_has_no_text_whose_format_could_matter() -> None:
    form = {"format": {"type": "json_schema", "name": "m", "schema": MOMENT}}
    tool = {"type": "function", "name": "look", "parameters": PATH}
    call = responses(text=form, tools=[tool], tool_choice={"type": "function", "name": "look"})
    assert "text.format" in call.ignored
    (params,) = call.params
    assert params.structured is not None and params.structured.kind == "grammar"


def test_b2_a_strict_tool_keeps_its_definitions(llm: LLM) -> None:
    assert '"enum": ["left", "right"]' in shown(chat(tools=[strict_tool(SIDE)]))
    prepared(chat(tools=[strict_tool(SIDE)], tool_choice="required"), llm.engine.prepare)


def test_b5_a_parameter_that_makes_no_grammar_is_named_with_its_tool_and_the_whole_reason(llm: LLM) -> None:
    bad = {"type": "array", "items": {"type": "string", "pattern": "^(?!a)b$"}}
    tools = [
        {"type": "function", "function": {"name": f"t{number}", "parameters": PATH if number != 30 else
         {"type": "object", "properties": {"fine": {"type": "string"}, "rule": bad}}}}
        for number in range(60)
    ]  # fmt: skip
    shown(chat(tools=tools))
    with pytest.raises(
        PromptError, match=r"parameter 'rule' of tool 't30' .*\$\.items: .*look-ahead.* is not supported"
    ):
        prepared(chat(tools=tools, tool_choice="required"), llm.engine.prepare)
