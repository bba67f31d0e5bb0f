"""Answers in the three chat protocols: tool calls and reasoning are found or left as text, and streams add up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spyglass.server.protocols.events import HOLE, EventTemplate, sse
from tests.server.protocol_parts import (
    FAMILIES,
    LOOSE,
    PATH,
    PROTOCOLS,
    ChatProtocol,
    Family,
    Said,
    call_of,
    cut,
    last_delta,
    output,
    said_stream,
    said_whole,
    stream_of,
    whole_of,
)

TOOLS = {"look": PATH, "run": LOOSE, "now": {"type": "object", "properties": {}}}
SIZES = range(1, 8)
CALLED = {"chat": "tool_calls", "messages": "tool_use", "responses": "completed"}
STOPPED = {"chat": "stop", "messages": "end_turn", "responses": "completed"}
CUT = {"chat": "length", "messages": "max_tokens", "responses": "incomplete"}


def tags(text: str, family: Family) -> str:
    """V4 markup in a family's own spelling."""
    if family == "deepseek_v4":
        return text
    return (
        text.replace("｜DSML｜tool_calls", "｜DSML｜ calls")
        .replace("｜DSML｜", "｜DSML｜ ")
        .replace("｜  calls", "｜ calls")
    )


def parameter(name: str, value: str, text: bool = True) -> str:
    return f'<｜DSML｜parameter name="{name}" string="{"true" if text else "false"}">{value}</｜DSML｜parameter>\n'


def invoke(name: str, *parameters: str) -> str:
    return f'<｜DSML｜invoke name="{name}">\n{"".join(parameters)}</｜DSML｜invoke>\n'


def block(*invokes: str) -> str:
    return f"\n\n<｜DSML｜tool_calls>\n{''.join(invokes)}</｜DSML｜tool_calls>"


def say(
    text: str,
    protocol: ChatProtocol = "chat",
    family: Family = "deepseek_v4",
    *,
    reason: Any = "stop",
    tools: dict[str, Any] | None = TOOLS,
    **body: Any,
) -> Said:
    """What an answer says, whole and in pieces of 1 to 7 characters, which must all be the same."""
    finished = output(text, reason=reason)
    whole = said_whole(protocol, whole_of(call_of(protocol, family, tools=tools, **body), finished))
    for size in SIZES:
        streamed = call_of(protocol, family, tools=tools, stream=True, **body)
        said = said_stream(protocol, stream_of(streamed, cut(text, size), finished))
        assert (said.reasoning, said.content, said.end) == (whole.reasoning, whole.content, whole.end)
        assert [name for name, _ in said.calls] == [name for name, _ in whole.calls]
        for (_, streamed_arguments), (_, arguments) in zip(said.calls, whole.calls, strict=True):
            same = streamed_arguments == arguments
            assert same or json.loads(streamed_arguments or "{}") == json.loads(arguments)
    return whole


def arguments(said: Said) -> list[Any]:
    return [json.loads(text) for _, text in said.calls]


VALUES = [
    "ls 2>&1",
    "a < b",
    "</",
    "｜",
    "</｜DSML",
    "</｜DSML｜",
    "<｜DSML｜invoke",
    'say "hi"\n\\n',
    "</think>",
    "{'a': 1}",
    "",
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("value", VALUES)
def test_a_parameter_holds_exactly_what_the_model_wrote(family: Family, value: str) -> None:
    said = say(tags(block(invoke("look", parameter("path", value))), family), family=family)
    assert arguments(said) == [{"path": tags(value, family)}] and said.content == "" and said.end == "tool_calls"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_reasoning_and_several_calls_come_apart(protocol: ChatProtocol, family: Family) -> None:
    calls = block(invoke("look", parameter("path", "/x"), parameter("n", "3", text=False)), invoke("now"))
    said = say(tags("I think.</think>\n\nLooking." + calls, family), protocol, family, thinking=True)
    assert (said.reasoning, said.content, said.end) == ("I think.", "Looking.", CALLED[protocol])
    assert [name for name, _ in said.calls] == ["look", "now"]
    assert arguments(said) == [{"path": "/x", "n": 3}, {}]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_markup_of_a_call_reaches_the_text(protocol: ChatProtocol) -> None:
    call = call_of(protocol, tools=TOOLS, stream=True, thinking=True)
    text = "hm</think>ok" + block(invoke("look", parameter("path", "/x")))
    events = stream_of(call, cut(text, 3), output(text))
    assert "DSML" not in json.dumps(events, ensure_ascii=False)
    if protocol == "responses":
        added = [e["item"]["type"] for e in events if e["type"] == "response.output_item.added"]
        assert added == ["reasoning", "message", "function_call"]
        assert [e["sequence_number"] for e in events] == list(range(len(events)))


CLOSED, OPEN = invoke("look", parameter("path", "/x")), invoke("look", parameter("path", "/x"))[:-8]
LEFT_AS_TEXT = {
    "an orphan call that is not closed": "see " + OPEN,
    "an orphan call without a required parameter": "see " + invoke("look", parameter("n", "1", text=False)),
    "an orphan call of an unknown tool": "see " + invoke("rm", parameter("path", "/x")),
    "a malformed envelope": '<｜DSML｜toolcall>Read\n```json\n{"path": "/x"}\n```',
    "prose that names the marker": "The marker is <｜DSML｜tool_calls> and then <｜DSML｜invoke name=...>.",
    "an empty block": block(),
    "a lone closing tag": "done</｜DSML｜tool_calls>",
    "an unfinished marker": "so <｜DSM",
    "the block of the other family": tags(block(CLOSED), "deepseek_v41"),
}


@pytest.mark.parametrize("text", LEFT_AS_TEXT.values(), ids=LEFT_AS_TEXT)
def test_what_is_no_call_stays_text_once_and_whole(text: str) -> None:
    said = say(text)
    assert (said.content, said.calls, said.end) == (text.lstrip("\n"), [], "stop")


def test_broken_markup_is_noted_once_per_answer() -> None:
    for text, odd in [("plain", False), (block(CLOSED), False), (LEFT_AS_TEXT["a malformed envelope"], True)]:
        call = call_of("chat", tools=TOOLS)
        whole_of(call, output(text))
        assert call.reply.malformed_tool_call is odd


def test_the_v41_parser_leaves_v4_markup_alone() -> None:
    said = say(block(CLOSED), family="deepseek_v41")
    assert said.calls == [] and said.content == block(CLOSED).lstrip("\n")


def test_an_orphan_call_that_is_sound_is_a_call() -> None:
    said = say("I look. " + CLOSED)
    assert arguments(said) == [{"path": "/x"}] and said.content == "I look. " and said.end == "tool_calls"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_without_tools_markup_is_text(protocol: ChatProtocol) -> None:
    text = "The format: " + block(CLOSED)
    said = say(text, protocol, tools=None)
    assert (said.content, said.calls, said.end) == (text, [], STOPPED[protocol])


def test_arguments_that_were_wrapped_once_more_are_unwrapped() -> None:
    inner = '{"path": "/x", "n": 2}'
    for wrapper in ("arguments", "input"):
        said = say(block(invoke("look", parameter(wrapper, inner, text=False))))
        assert arguments(said) == [{"path": "/x", "n": 2}]
        assert arguments(say(block(invoke("look", parameter(wrapper, "/y"))))) == [{"path": "/y"}]
    said = say(block(invoke("run", parameter("arguments", '{"command": "x"}', text=False))))
    assert arguments(said) == [{"arguments": {"command": "x"}}], "the tool really has that parameter"
    strange = say(block(invoke("look", parameter("arguments", '{"unknown": 1}', text=False))))
    assert arguments(strange) == [{"arguments": {"unknown": 1}}]


@pytest.mark.parametrize("value", ["nope", "ls 2>&1", "{", "NaN", ""])
def test_a_value_that_is_not_the_json_it_claims_to_be_becomes_text(value: str) -> None:
    assert arguments(say(block(invoke("run", parameter("command", value, text=False))))) == [{"command": value}]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_answer_that_ends_while_reasoning_is_content_too(protocol: ChatProtocol) -> None:
    said = say("Good morning!", protocol, thinking=True)
    assert (said.reasoning, said.content, said.end) == ("Good morning!", "Good morning!", STOPPED[protocol])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_reasoning_that_eats_the_whole_answer_leaves_empty_content(protocol: ChatProtocol) -> None:
    said = say("Let me", protocol, thinking=True, reason="length")
    assert (said.reasoning, said.content, said.end) == ("Let me", "", CUT[protocol])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_call_that_ends_reasoning_is_a_call(protocol: ChatProtocol) -> None:
    said = say("need weather" + block(CLOSED), protocol, thinking=True)
    assert arguments(said) == [{"path": "/x"}] and said.reasoning == "need weather" and said.end == CALLED[protocol]


def test_a_call_quoted_in_reasoning_is_reasoning() -> None:
    quoted = "like" + block(CLOSED)
    for more in ("</think>Yes.", " so I will not.</think>Yes."):
        said = say(quoted + more, thinking=True)
        assert said.calls == [] and said.content == "Yes." and said.reasoning == quoted + more.split("</think>")[0]
    cut_off = say(quoted + " so I", thinking=True, reason="length")
    assert cut_off.calls == [] and cut_off.reasoning == quoted + " so I"


def test_a_call_cut_by_length_is_never_made_whole() -> None:
    text = block(invoke("run", parameter("command", "rm -rf /data/me/old")))
    at = text.index("/data") + 1
    for reason in ("length", "stop"):
        (call,) = say(text[:at], reason=reason).calls
        with pytest.raises(ValueError, match="Unterminated"):
            json.loads(call[1])
    begun = text.index("</｜DSML｜para") + len("</｜DSML｜param")
    assert arguments(say(text[:begun])) == [{"command": "rm -rf /data/me/old"}], "only the closing tag is missing"
    (call,) = say(text[:begun], reason="length").calls
    assert call[1] == '{"command": "rm -rf /data/me/old"', "more parameters may have been meant"
    (call,) = say(text[:at] + "<", reason="length").calls
    assert call[1] == '{"command": "rm -rf /<'


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("stopped_by", [None, "x"])
def test_a_call_that_was_cut_off_is_never_given_as_one_to_run(protocol: ChatProtocol, stopped_by: str | None) -> None:
    """Wherever the length limit or a stop string ends the answer, also between two parameters and before the first."""
    call = block(invoke("look", parameter("path", "ab"), parameter("n", "12", text=False)))
    finished = call.index("</｜DSML｜invoke>") + len("</｜DSML｜invoke>")
    for end in range(len(call) + 1):
        cut_off = output(call[:end], reason="stop" if stopped_by else "length", stopped_by=stopped_by)
        said = said_whole(protocol, whole_of(call_of(protocol, tools=TOOLS), cut_off))
        events = stream_of(call_of(protocol, tools=TOOLS, stream=True), cut(call[:end], 5), cut_off)
        for each in (said, said_stream(protocol, events)):
            assert each.end == said.end and len(each.calls) == len(said.calls)
            if end >= finished:
                assert arguments(each) == [{"path": "ab", "n": 12}]
            elif each.calls:
                assert each.end not in ("tool_calls", "tool_use", "completed")
                assert all(
                    _is_unfinished(value) or (protocol == "messages" and value == "{}") for _, value in each.calls
                )
    assert say("<｜DSML｜invoke", protocol="chat", tool_choice="required", reason="length").content == ""


def _is_unfinished(value: str) -> bool:
    try:
        json.loads(value)
    except ValueError:
        return True
    return False


def test_an_answer_that_cannot_have_the_form_asked_for_is_the_requests_fault() -> None:
    for protocol in PROTOCOLS:
        call = call_of(protocol)
        call.reply.push(0, last_delta("", output("", reason="abort", error="it cannot go on", grammar_violation=True)))
        status, body = call.reply.whole("req_1")
        assert status == 400 and "it cannot go on" in json.dumps(body)


def test_one_call_at_most_when_calls_may_not_be_parallel() -> None:
    text = block(CLOSED, invoke("now"))
    assert [name for name, _ in say(text).calls] == ["look", "now"]
    assert [name for name, _ in say(text, parallel_tool_calls=False).calls] == ["look"]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert [name for name, _ in say(text, "messages", tool_choice=choice).calls] == ["look"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_must_be_made_begins_inside_the_block(family: Family) -> None:
    text = tags(CLOSED + "</｜DSML｜tool_calls>", family)
    said = say(text, family=family, tool_choice="required")
    assert arguments(said) == [{"path": "/x"}] and said.content == "" and said.end == "tool_calls"
    assert say("I would rather not.", family=family, tool_choice="required").content == "I would rather not."


def test_an_answer_that_continues_a_message_begins_where_that_stops() -> None:
    begun = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "It is", "prefix": True}]
    said = say("\n so.", tools=None, thinking=True, messages=begun)
    assert (said.reasoning, said.content) == ("", "\n so.")
    begun[1] |= {"content": "", "reasoning_content": "I think"}
    said = say(" so</think>Yes.", tools=None, thinking=True, messages=begun)
    assert (said.reasoning, said.content) == (" so", "Yes.")


PIECES = st.sampled_from(
    [
        "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", '<｜DSML｜invoke name="look">', "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="path" string="true">', "</｜DSML｜parameter>", "</think>", "<think>", "<", "｜DSML｜",
        '<｜DSML｜parameter name="n" string="false">', "3", "text ", "\n", "\n\n", "{}", '"', "世界", "\\", "</｜D",
    ]
)  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=4), max_size=14).map("".join) | st.builds(
    lambda before, call, after: before + block(call) + after,
    st.text(max_size=5),
    st.text(max_size=8).map(lambda value: invoke("look", parameter("path", value))),
    st.text(max_size=5),
)


@settings(max_examples=150, deadline=None)
@given(
    text=TEXTS.map(lambda text: text.encode("utf-8", "replace").decode()),
    size=st.integers(1, 9),
    thinking=st.booleans(),
    reason=st.sampled_from(["stop", "length"]),
    protocol=st.sampled_from(PROTOCOLS),
    family=st.sampled_from(FAMILIES),
)
def test_any_stream_adds_up_to_the_whole_answer(
    text: str, size: int, thinking: bool, reason: Any, protocol: ChatProtocol, family: Family
) -> None:
    text, finished = tags(text, family), None
    finished = output(text, reason=reason)
    whole = said_whole(protocol, whole_of(call_of(protocol, family, tools=TOOLS, thinking=thinking), finished))
    call = call_of(protocol, family, tools=TOOLS, thinking=thinking, stream=True)
    said = said_stream(protocol, stream_of(call, cut(text, size), finished))
    if protocol == "messages":  # unfinished arguments are {} in a whole message
        said.calls = [(name, _or_empty(value)) for name, value in said.calls]
        whole.calls = [(name, _or_empty(value)) for name, value in whole.calls]
    assert said == whole


def _or_empty(value: str) -> str:
    try:
        return json.dumps(json.loads(value))
    except ValueError:
        return "{}"


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40).map(lambda text: text.encode("utf-8", "replace").decode()), size=st.integers(1, 9))
def test_text_without_markup_comes_through_unchanged(text: str, size: int) -> None:
    call = call_of("chat", tools=TOOLS, stream=True)
    said = said_stream("chat", stream_of(call, cut(text, size), output(text)))
    assert said.content == text.lstrip("\n") and said.calls == []


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=20), number=st.integers(0, 10**6))
def test_an_event_that_is_filled_in_is_the_event_written_anew(text: str, number: int) -> None:
    filled = EventTemplate({"a": HOLE, "b": {"c": HOLE}, "d": "e"}, "name").fill(text, number)
    assert filled == sse({"a": text, "b": {"c": number}, "d": "e"}, "name")
