"""Whole requests as programs send them, rebuilt from public descriptions: all are taken, what does nothing is named."""

from __future__ import annotations

from typing import Any

import pytest

from spyglass.server.exchange import Call
from spyglass.server.protocols.endpoints import make_endpoints
from tests.server.protocol_parts import FAMILIES, URL, Family, served_of

CACHE = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "file_path": {"type": "string", "description": "Absolute path"},
        "limit": {"type": "number"},
        "todos": {"type": "array", "items": {"type": "object", "properties": {"status": {"enum": ["open", "done"]}}}},
    },
    "required": ["file_path"],
    "additionalProperties": False,
}
DEFINED = {
    "type": "object",
    "properties": {"mood": {"$ref": "#/$defs/Mood"}, "at": {"type": "string", "format": "date-time"}},
    "$defs": {"Mood": {"type": "string", "enum": ["glad", "sad"]}},
    "required": ["mood", "at"],
    "additionalProperties": False,
}
CHAT, RESPONSES, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"
SEEN = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}]


def function(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "read", "description": "d", "parameters": schema, **more}}


SHAPES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "Claude Code": (MESSAGES, {
        "model": "tiny", "max_tokens": 32000, "stream": True, "temperature": 1, "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": "You are a coding agent.", **CACHE}],
        "thinking": {"type": "enabled", "budget_tokens": 31999}, "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "tools": [{"name": "Read", "description": "d", "input_schema": SCHEMA, **CACHE}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>", **CACHE}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "I read."},
                {"type": "tool_use", "id": "t1", "name": "Read", "input": {"file_path": "/a"}, "caller": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "1: x", "is_error": False, **CACHE}]},
        ],
    }, {"context_management", "metadata", "thinking.budget_tokens"}),
    "Codex CLI": (RESPONSES, {
        "model": "tiny", "instructions": "You are a coding agent.", "stream": True, "store": False,
        "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "client_metadata": {"v": "1"},
        "access_programs": [], "text": {"verbosity": "medium"},
        "tools": [
            {"type": "function", "name": "shell", "description": "d", "strict": False, "parameters": SCHEMA},
            {"type": "custom", "name": "apply_patch", "description": "d", "format": {"type": "grammar"}},
            {"type": "web_search", "external_web_access": True}],
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "e"},
            {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c1", "status": "completed"},
            {"type": "function_call_output", "call_id": "c1", "output": "ok"},
            {"type": "custom_tool_call", "name": "apply_patch", "input": "***", "call_id": "c2", "status": "completed"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done"}],
    }, {"client_metadata", "access_programs", "tools[] (custom)", "tools[] (web_search)"}),
    "Cline": (CHAT, {
        "model": "tiny", "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": SEEN}],
    }, {"messages[].content[].image_url.detail"}),
    "Continue, completion": (COMPLETIONS, {
        "model": "tiny", "prompt": "def f(", "suffix": "\n", "max_tokens": 64, "temperature": 0.01, "stream": True,
        "stop": ["\n\n", "```"], "presence_penalty": 0, "frequency_penalty": 0,
    }, set()),
    "Open WebUI": (CHAT, {
        "model": "tiny", "stream": True, "messages": [{"role": "user", "content": SEEN}], "session_id": "s",
        "chat_id": "c", "id": "m", "features": {"web_search": False}, "variables": {}, "model_item": {},
        "background_tasks": {"title_generation": True}, "stream_options": {"include_usage": True},
    }, {"chat_id", "features", "background_tasks"}),
    "LiteLLM": (CHAT, {
        "model": "tiny", "user": "u", "metadata": {"a": "b"}, "tools": [{**function(SCHEMA), **CACHE}], "n": 1,
        "messages": [
            {"role": "user", "content": "q", **CACHE},
            {"role": "assistant", "content": "", "tool_calls": [
                {"index": 0, "id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}],
             "function_call": None, "provider_specific_fields": {"a": 1}},
            {"role": "tool", "tool_call_id": "c", "name": "read", "content": [{"type": "text", "text": "x"}]}],
    }, {"messages[].cache_control", "tools[].cache_control", "messages[].provider_specific_fields"}),
    "LangChain": (CHAT, {
        "model": "tiny", "n": 1, "stream": False, "temperature": 0.7, "parallel_tool_calls": False,
        "tools": [function(SCHEMA, strict=True)], "messages": [{"role": "user", "content": "q"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "M", "strict": True, "schema": DEFINED}},
    }, {"response_format.json_schema.name"}),
    "LlamaIndex": (CHAT, {
        "model": "tiny", "stream": False, "temperature": 0.1, "tools": [function(SCHEMA, strict=False)],
        "tool_choice": "auto", "parallel_tool_calls": True, "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "read", "arguments": {"file_path": "/a"}}}]},
            {"role": "tool", "content": None, "tool_call_id": "c"}],
    }, set()),
    "pydantic-ai": (CHAT, {
        "model": "tiny", "stream": False, "n": 1, "parallel_tool_calls": True, "tool_choice": "required",
        "tools": [function(DEFINED, strict=True)], "messages": [{"role": "user", "content": SEEN}],
    }, set()),
    "instructor": (CHAT, {
        "model": "tiny", "messages": [{"role": "user", "content": "q"}], "tools": [function(DEFINED)],
        "tool_choice": {"type": "function", "function": {"name": "read"}},
    }, set()),
    "OpenAI agents": (RESPONSES, {
        "model": "tiny", "instructions": "i", "include": [], "input": [{"role": "user", "content": "q"}],
        "tools": [{"type": "function", "name": "read", "parameters": SCHEMA, "strict": True, "description": "d"}],
        "previous_response_id": None, "prompt": None, "truncation": None, "top_logprobs": None, "store": None,
        "reasoning": None, "metadata": {}, "stream": False, "service_tier": None, "max_tool_calls": None,
        "text": {"format": {"type": "json_schema", "name": "final_output", "schema": DEFINED, "strict": True}},
    }, {"metadata", "text.format.name"}),
    "guidellm": (CHAT, {
        "model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}], "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "max_tokens": 8,
        "max_completion_tokens": 8, "stop": None, "ignore_eos": True,
    }, set()),
    "lm-evaluation-harness": (COMPLETIONS, {
        "model": "tiny", "prompt": [[5, 6, 7], [8, 9]], "temperature": 0, "max_tokens": 1, "logprobs": 1,
        "seed": 1234, "echo": True,
    }, set()),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("client", SHAPES)
def test_whole_requests_of_programs_are_taken_and_what_has_no_effect_is_named(client: str, family: Family) -> None:
    path, body, ignored = SHAPES[client]
    endpoints = {endpoint.path: endpoint for endpoint in make_endpoints(served_of(family))}
    call = endpoints[path].parse(body, None)
    assert isinstance(call, Call) and ignored <= set(call.ignored), call.ignored
