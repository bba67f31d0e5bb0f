"""OpenAI Responses: `POST /v1/responses`. Nothing is stored, so a conversation is sent whole every time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import deepseek_recipe

from spyglass.engine.request import Structured
from spyglass.errors import json_kind
from spyglass.prompt.chat import IMAGE_LEFT_OUT, IMAGE_ROLES, STUB_URL
from spyglass.server.exchange import Call, Fetch, Served
from spyglass.server.protocols.called import arguments_text
from spyglass.server.protocols.conversation import (
    ALLOWED_TOOLS,
    CHOICES,
    EFFORTS,
    Images,
    ModelEndpoint,
    ParsedRequest,
    Tool,
    call_of,
    choose_model,
    leave_out_tool,
    parse_conversation,
    parse_tool,
    read_role,
    require_memory,
    structured_output,
    tokenizer_of,
    unique_tools,
)
from spyglass.server.protocols.events import Tokens
from spyglass.server.protocols.fields import (
    NEVER,
    FieldReader,
    Fields,
    choice_field,
    flag_field,
    list_of,
    refuse,
    text_field,
)
from spyglass.server.protocols.responses_reply import ResponsesReply
from spyglass.server.protocols.sampling import (
    limit_field,
    sampled_fields,
    sampling,
    schema_at,
    token_limit,
)

_REASONING = Fields(read=frozenset({"effort"}), ignored=frozenset({"summary", "generate_summary", "context", "mode"}))
_TOOL = Fields(
    read=frozenset({"type", "name", "description", "parameters", "strict"}), ignored=frozenset({"defer_loading"})
)
_NAMESPACE = Fields(read=frozenset({"type", "name", "description", "tools"}), inner={"tools": (_TOOL,)})
_CHOICE = Fields(read=frozenset({"type", "name", "namespace"}))
_FORMAT = Fields(read=frozenset({"type", "schema", "strict"}), ignored=frozenset({"name", "description"}))
_TEXT = Fields(read=frozenset({"format"}), neutral={"verbosity": ("medium",)}, inner={"format": _FORMAT})
_REASONED = Fields(read=frozenset({"type", "text"}))
_LOGPROBS = "message.output_text.logprobs"
_INCLUDE = {_LOGPROBS, "reasoning.encrypted_content"}
_ITEM = frozenset({"type"})
_UNUSED = frozenset({"id", "status", "internal_chat_message_metadata_passthrough", "cache_control"})
_PARTS = {
    "input_text": Fields(read=frozenset({"type", "text"}), ignored=frozenset({"cache_control"})),
    "output_text": Fields(read=frozenset({"type", "text"}), ignored=frozenset({"annotations", "logprobs"})),
    "refusal": Fields(read=frozenset({"type", "refusal"})),
    "input_image": Fields(
        read=frozenset({"type", "image_url"}),
        ignored=frozenset({"detail", "cache_control"}),
        neutral={"file_id": NEVER},
    ),
}
_LIMITS = ("max_output_tokens", "max_tokens")
_OF_CHAT = {"text": "input_text", "image_url": "input_image"}  # parts by their names in Chat Completions
_ITEMS = {
    "message": Fields(
        read=_ITEM | {"role", "content"},
        ignored=_UNUSED | {"phase", "end_turn"},
        inner={"content": tuple(_PARTS.values())},
    ),
    "reasoning": Fields(
        read=_ITEM | {"content"}, ignored=_UNUSED | {"summary", "encrypted_content"}, inner={"content": (_REASONED,)}
    ),
    "function_call": Fields(read=_ITEM | {"call_id", "name", "arguments", "namespace"}, ignored=_UNUSED),
    "function_call_output": Fields(read=_ITEM | {"call_id", "output"}, ignored=_UNUSED),
}
_CALLS = {  # calls of tools the client ran, and what of
    "custom_tool_call": "input", "local_shell_call": "action", "shell_call": "action", "apply_patch_call": "operation",
}  # fmt: skip
_OUTPUTS = tuple(f"{call}_output" for call in _CALLS)
# What servers ran themselves; in a history it is told in words, by the field that says what was done.
_NOTES = {
    "web_search_call": "action", "file_search_call": "queries", "code_interpreter_call": "code", "mcp_call": "output",
    "image_generation_call": "revised_prompt", "tool_search_call": "arguments", "tool_search_output": "tools",
    "mcp_list_tools": "server_label", "computer_call": "action", "computer_call_output": "status",
    "mcp_approval_request": "name", "mcp_approval_response": "approve", "compaction": "id",
}  # fmt: skip
_NOTE_CHARS = 2000
RESPONSES_FIELDS = sampled_fields(
    read={"input", "instructions", "reasoning", "text", "tools", "tool_choice", "max_output_tokens", "top_logprobs"}
    | {"model", "stream", "include", "parallel_tool_calls", "stop", "max_tokens"},
    ignored={"metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"stream_options", "max_tool_calls", "client_metadata", "access_programs"},
    neutral={
        "background": (False,), "truncation": ("disabled", "auto"), "context_management": ([], {}),
        "response_format": ({"type": "text"},),
        "previous_response_id": NEVER, "conversation": NEVER, "prompt": NEVER, "moderation": NEVER,
    },
    inner={
        "input": tuple(_ITEMS.values()), "reasoning": _REASONING, "text": _TEXT,
        "tools": (_TOOL, _NAMESPACE), "tool_choice": _CHOICE,
    },
)  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True)
class ResponsesEndpoint(ModelEndpoint):
    """Responses of one model."""

    path: str = "/v1/responses"
    fields: Fields = RESPONSES_FIELDS

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Call:
        reader, given = self.begin(body)
        model, adapter = choose_model(self.served, given)
        stream = flag_field(given, "stream")
        parsed, own_format = parse_responses(self.served, given, reader, fetch)
        output = structured_output(self.served, parsed, given, own_format, reader, "text.format")
        with_logprobs = "top_logprobs" in given or _LOGPROBS in given.get("include", ())
        logprobs = given.get("top_logprobs", 0) if with_logprobs else None
        params = sampling(
            given,
            {"max_tokens": limit_field(given, _LIMITS), "logprobs": "top_logprobs"},
            max_tokens=token_limit(given, _LIMITS, parsed.default_tokens, logprobs=logprobs, field="top_logprobs"),
            stop=given.get("stop"),
            stop_after=parsed.stop_after,
            logprobs=logprobs,
            structured=output,
        )
        require_memory(self.served, parsed.prompt, params, "input")
        tokens = Tokens(tokenizer_of(self.served), reasoning=parsed.expected.reasoning, with_logprobs=with_logprobs)
        reply = ResponsesReply(parsed, given, model=model, family=self.served.config.family, tokens=tokens)
        return call_of(parsed, (model, adapter), reader, reply, (params,), stream=stream)


def parse_responses(
    served: Served, given: Mapping[str, Any], reader: FieldReader, fetch: Fetch | None
) -> tuple[ParsedRequest, Structured | None]:
    """The prompt of a request's given fields, and the format of answer that `text` asks for.

    Raises:
        PromptError: it cannot be rendered; the message names the place.
    """
    images = Images(served, fetch)
    body: dict[str, Any] = {"input": given.get("input")}
    if not isinstance(body["input"], str):
        items = enumerate(list_of(body["input"], "input", least=1))
        body["input"] = [_item(item, f"input[{place}]", images, reader) for place, item in items]
    if "instructions" in given:
        body["instructions"] = text_field(given, "instructions", "")
    reasoning = reader.read(given.get("reasoning", {}), _REASONING, "reasoning")
    effort = choice_field(reasoning, "effort", EFFORTS, "reasoning")
    if effort is not None:
        body["reasoning"] = {"effort": effort}
    for value in list_of(given.get("include", []), "include"):
        if not isinstance(value, str) or value not in _INCLUDE:
            reader.ignore(f"include[] ({str(value)[:100]})")
            if reader.strict:
                refuse("include", f"has {str(value)[:100]!r}; this server has {' and '.join(sorted(_INCLUDE))}")
    choice, named = _tool_choice(given.get("tool_choice", "auto"), reader)
    own_format = _format(given.get("text", {}), reader)
    parsed = parse_conversation(
        served,
        deepseek_recipe.ResponsesRequest,
        body,
        images,
        tools=_tools(given, reader),
        choice=choice,
        named=named,
        shown_format=own_format,
        one_call=not flag_field(given, "parallel_tool_calls", default=True),
        field="input",
    )
    return parsed, own_format


def _item(item: object, where: str, images: Images, reader: FieldReader) -> dict[str, Any]:
    """One input item for the library: known fields only, images as stubs, items of foreign tools as calls or words."""
    if not isinstance(item, Mapping):
        refuse(where, f"must be an object, not {json_kind(item)}")
    kind = item.get("type", "message")
    if isinstance(kind, str) and kind in _CALLS:
        work = item.get(_CALLS[kind])
        arguments = work if isinstance(work, Mapping) else {_CALLS[kind]: work}
        name = item.get("name") or kind.removesuffix("_call")
        item = {"call_id": item.get("call_id") or item.get("id"), "name": name, "arguments": arguments}
        kind = "function_call"
    elif isinstance(kind, str) and kind in _OUTPUTS:
        output = item.get("output", "")
        if isinstance(output, list) and not any(isinstance(part, Mapping) and "type" in part for part in output):
            output = json.dumps(output, ensure_ascii=False)  # what a shell wrote, by stream
        item = {"call_id": item.get("call_id") or item.get("id"), "output": output}
        kind = "function_call_output"
    elif isinstance(kind, str) and kind in _NOTES:
        done = json.dumps(item.get(_NOTES[kind]), ensure_ascii=False)[:_NOTE_CHARS]
        return {"type": "message", "role": "assistant", "content": f"[{kind}: {done}]"}
    if not isinstance(kind, str) or kind not in _ITEMS:
        refuse(where, f"has the unknown type {str(kind)[:100]!r}; items are {', '.join(_ITEMS)}")
    given = reader.read(item, _ITEMS[kind], where)
    if kind == "reasoning":
        parts = enumerate(list_of(given.get("content", []), f"{where}.content"))
        texts = [
            text_field(reader.read(p, _REASONED, f"{where}.content[{n}]"), "text", f"{where}.content[{n}]")
            for n, p in parts
        ]
        content = [{"type": "reasoning_text", "text": text} for text in texts]
        return {"type": kind, "summary": [], "content": content}  # the library wants a summary and reads `content`
    if kind == "function_call":
        return _function_call(given, where)
    if kind == "function_call_output":
        call_id = text_field(given, "call_id", where)
        output = _content(given.get("output", ""), f"{where}.output", "tool", images, reader)
        return {"type": kind, "call_id": call_id, "output": output}
    role = read_role(given, _ROLES, where)
    content = _content(given.get("content", ""), f"{where}.content", role, images, reader)
    return {"type": kind, "role": role, "content": content}


def _function_call(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A call of the history; arguments that are missing or an object are what they obviously mean."""
    arguments = arguments_text(given, where)
    name = text_field(given, "name", where)
    if "namespace" in given:
        name = f"{text_field(given, 'namespace', where)}::{name}"
    return {
        "type": "function_call",
        "call_id": text_field(given, "call_id", where),
        "name": name,
        "arguments": arguments,
    }


def _content(value: object, where: str, role: str, images: Images, reader: FieldReader) -> Any:
    if isinstance(value, list | tuple):
        return [_part(part, f"{where}[{place}]", role, images, reader) for place, part in enumerate(value)]
    return (
        value
        if isinstance(value, str)
        else refuse(where, f"must be a string or a list of parts, not {json_kind(value)}")
    )


def _part(part: object, where: str, role: str, images: Images, reader: FieldReader) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    field = ".image_url"
    if isinstance(part, Mapping) and isinstance(kind, str) and kind in _OF_CHAT:
        image, kind = part.get("image_url"), _OF_CHAT[kind]
        part = {**part, "type": kind}
        if isinstance(image, Mapping):
            part, field = {**part, "image_url": image.get("url")}, ".image_url.url"
    if not isinstance(kind, str) or kind not in _PARTS:
        refuse(where, f"has the unknown type {str(kind)[:100]!r}; parts are {', '.join(_PARTS)}")
    given = reader.read(part, _PARTS[kind], where)
    if kind == "refusal":
        return {"type": "output_text", "text": text_field(given, "refusal", where)}
    if kind != "input_image":
        return {"type": kind, "text": text_field(given, "text", where)}
    if role not in (*IMAGE_ROLES, "developer"):
        refuse(where, f"is an image in a message of role {role!r}; images go to {', '.join(IMAGE_ROLES)}")
    stub = images.stubs.take(images.source(given.get("image_url"), where + field), where, field)
    if stub is None:
        return {"type": "input_text", "text": IMAGE_LEFT_OUT}
    return {"type": "input_image", "image_url": STUB_URL + stub}


def _tools(given: Mapping[str, Any], reader: FieldReader) -> tuple[Tool, ...]:
    """The functions, those of a namespace with its name before theirs."""
    found: list[tuple[Tool, str]] = []

    def add(tool: object, where: str, namespace: str = "") -> None:
        kind = tool.get("type") if isinstance(tool, Mapping) else "function"
        if kind == "namespace" and not namespace:
            inner = reader.read(tool, _NAMESPACE, where)
            name = text_field(inner, "name", where)
            for number, function in enumerate(list_of(inner.get("tools", []), f"{where}.tools")):
                add(function, f"{where}.tools[{number}]", f"{name}::")
        elif kind != "function":
            leave_out_tool(kind, where, given.get("tool_choice"), reader)
        else:
            if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping):  # as in Chat Completions
                tool, where = tool["function"], f"{where}.function"
            function = reader.read(tool, _TOOL, where)
            function["name"] = namespace + text_field(function, "name", where)
            found.append((parse_tool(function, where), where))

    for number, tool in enumerate(list_of(given.get("tools", []), "tools")):
        add(tool, f"tools[{number}]")
    return unique_tools(found)


def _tool_choice(value: object, reader: FieldReader) -> tuple[str, str | None]:
    """One of CHOICES, and the name of the only tool that may be called."""
    if isinstance(value, Mapping) and value.get("type") == "function":
        chosen = reader.read(value, _CHOICE, "tool_choice")
        namespace = f"{chosen['namespace']}::" if "namespace" in chosen else ""
        return "required", namespace + text_field(chosen, "name", "tool_choice")
    if isinstance(value, Mapping):
        kind = str(value.get("type"))[:100]
        if kind == "allowed_tools":
            refuse("tool_choice", ALLOWED_TOOLS)
        refuse("tool_choice", f"asks for a tool of type {kind!r}, which this server does not run")
    return choice_field({"tool_choice": value}, "tool_choice", CHOICES) or "auto", None


def _format(value: object, reader: FieldReader) -> Structured | None:
    """The format of answer that `text.format` asks for."""
    inner = reader.read(value, _TEXT, "text").get("format")
    if inner is None:
        return None
    given = reader.read(inner, _FORMAT, "text.format")
    kind = choice_field(given, "type", ("text", "json_object", "json_schema"), "text.format")
    flag_field(given, "strict", "text.format")  # without effect: an answer fits its schema anyway
    if kind == "json_schema":
        if "schema" not in given:
            refuse("text.format.schema", "is missing")
        return schema_at("text.format.schema", given["schema"])
    return Structured(kind="json") if kind == "json_object" else None
