"""What an answer tells besides its text: usage, errors, log-probabilities, why it stopped."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from spyglass.engine.request import TokenLogprob
from tests.server.protocol_parts import (
    PROTOCOLS,
    ChatProtocol,
    call_of,
    cut,
    events_of,
    last_delta,
    output,
    picture,
    stream_of,
    tokenizer_of,
    whole_of,
    words,
)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_usage_counts_pictures_cached_and_reasoning_tokens(protocol: ChatProtocol) -> None:
    think_end = tokenizer_of("deepseek_v4").special_id("</think>")
    assert think_end is not None
    finished = output("hm</think>ok", [5, 6, think_end, 7], cached=3)
    content = [words(protocol, "q"), picture(protocol)]
    call = call_of(protocol, thinking=True, content=content)
    span, total = call.prompt.spans[0].length, len(call.prompt)
    usage = whole_of(call, finished)["usage"]
    if protocol == "messages":
        assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (total - 3, 3, 4)
        assert (usage["image_tokens"], usage["images"]) == (span, 1)
    else:
        put, out = ("prompt", "completion") if protocol == "chat" else ("input", "output")
        assert (usage[f"{put}_tokens"], usage[f"{out}_tokens"], usage["total_tokens"]) == (total, 4, total + 4)
        assert usage[f"{put}_tokens_details"] == {"cached_tokens": 3, "image_tokens": span, "images": 1}
        assert usage[f"{out}_tokens_details"] == {"reasoning_tokens": 3}
    more = {"stream_options": {"include_usage": True}} if protocol == "chat" else {}
    streamed = call_of(protocol, thinking=True, content=content, stream=True, **more)
    events = stream_of(streamed, cut(finished.text, 3), finished)
    last = [event for event in events if "usage" in (event if protocol != "responses" else event.get("response", {}))][
        -1
    ]
    assert (last["response"] if protocol == "responses" else last)["usage"] == usage


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_engine_error_becomes_the_protocols_own(protocol: ChatProtocol) -> None:
    failed = output("par", [5], reason="abort", error="the model failed in a step of this request")
    body = whole_of(call_of(protocol), failed)
    assert "the model failed" in body["error"]["message"]
    events = stream_of(call_of(protocol, stream=True), ["pa", "r"], failed)
    if protocol == "responses":
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
    error = events[-1]["response"]["error"] if protocol == "responses" else events[-1]["error"]
    assert "the model failed" in error["message"]
    aborted = whole_of(call_of(protocol), output("par", [5], reason="abort"))
    assert "ended before it was whole" in aborted["error"]["message"]


def test_logprobs_are_told_with_the_tokens_they_belong_to() -> None:
    tokenizer = tokenizer_of("deepseek_v4")
    ids = [*tokenizer.encode_text("hm"), tokenizer.special_id("</think>"), *tokenizer.encode_text("ok so")]
    entries = tuple(TokenLogprob(token_id=i, logprob=-float(n), top=((i, -float(n)),)) for n, i in enumerate(ids) if i)
    finished = output("hm</think>ok so", [entry.token_id for entry in entries], logprobs=entries)
    body = {"thinking": True, "logprobs": True, "top_logprobs": 1}
    whole = whole_of(call_of("chat", **body), finished)["choices"][0]["logprobs"]
    assert [one["token"] for one in whole["reasoning_content"]] == ["hm", "</think>"]
    assert [one["token"] for one in whole["content"]] == ["ok", " so"]
    assert whole["content"][0]["top_logprobs"] == [{"token": "ok", "logprob": -2.0, "bytes": [111, 107]}]
    call = call_of("chat", stream=True, **body)
    data = call.reply.begin("r")
    for entry, piece in zip(entries, ["hm", "</think>", "ok"], strict=False):
        data += call.reply.push(0, dataclasses.replace(last_delta(piece, finished, (entry,)), output=None))
    data += call.reply.push(0, last_delta(" so", finished, entries[3:])) + call.reply.end()
    streamed: dict[str, list[Any]] = {"content": [], "reasoning_content": []}
    for event in events_of(data):
        for name, told in (event["choices"][0]["logprobs"] or {}).items():
            streamed[name] += told
    assert streamed == whole


def test_responses_tell_logprobs_of_their_text() -> None:
    token = tokenizer_of("deepseek_v4").encode_text("ok")[0]
    entry = TokenLogprob(token_id=token, logprob=-1.0)
    finished = output("ok", [token], logprobs=(entry,))
    whole = whole_of(call_of("responses", top_logprobs=0), finished)
    told = whole["output"][0]["content"][0]["logprobs"]
    assert told == [{"token": "ok", "logprob": -1.0, "bytes": [111, 107], "top_logprobs": []}]
    call = call_of("responses", top_logprobs=0, stream=True)
    data = call.reply.begin("r") + call.reply.push(0, last_delta("ok", finished, (entry,)))
    events = events_of(data)
    assert [e["logprobs"] for e in events if e["type"].startswith("response.output_text")] == [told, told]
    assert events[-1]["response"]["output"] == [{**whole["output"][0], "id": events[-1]["response"]["output"][0]["id"]}]


def test_a_stop_sequence_is_named_in_messages() -> None:
    finished = output("one", [5, 6], stopped_by="two")
    body = whole_of(call_of("messages"), finished)
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "two")
    delta = stream_of(call_of("messages", stream=True), ["one"], finished)[-2]["delta"]
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": "two"}
