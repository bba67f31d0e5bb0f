"""Anthropic Messages: `POST /v1/messages`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import deepseek_recipe

from spyglass.config.json_file import parse_json_text
from spyglass.engine.request import Structured
from spyglass.errors import json_kind
from spyglass.prompt.chat import IMAGE_LEFT_OUT
from spyglass.server.errors import anthropic_error
from spyglass.server.exchange import Call, Fetch, Served
from spyglass.server.protocols.conversation import (
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
    RequestError,
    choice_field,
    flag_field,
    list_of,
    refuse,
    text_field,
)
from spyglass.server.protocols.messages_reply import MessagesReply
from spyglass.server.protocols.sampling import (
    sampled_fields,
    sampling,
    schema_at,
)

_SOURCE = Fields(read=frozenset({"type", "url", "data", "content"}), ignored=frozenset({"media_type"}))
_THINKING = Fields(read=frozenset({"type"}), ignored=frozenset({"budget_tokens", "display"}))
_FORMAT = Fields(read=frozenset({"type", "schema"}), ignored=frozenset({"name"}))
_OUTPUT = Fields(read=frozenset({"effort", "format"}), ignored=frozenset({"task_budget"}), inner={"format": _FORMAT})
_CACHED = frozenset({"cache_control"})
_BLOCKS = {
    "text": Fields(read=frozenset({"type", "text"}), ignored=_CACHED | {"citations"}),
    "image": Fields(read=frozenset({"type", "source"}), ignored=_CACHED, inner={"source": _SOURCE}),
    "document": Fields(
        read=frozenset({"type", "source", "title", "context"}),
        ignored=_CACHED | {"citations"},
        inner={"source": _SOURCE},
    ),
    "thinking": Fields(read=frozenset({"type", "thinking", "signature"}), ignored=_CACHED),
    "redacted_thinking": Fields(read=frozenset({"type"}), ignored=_CACHED | {"data"}),
    "tool_use": Fields(read=frozenset({"type", "id", "name", "input"}), ignored=_CACHED | {"caller"}),
    "tool_result": Fields(read=frozenset({"type", "tool_use_id", "content"}), ignored=_CACHED | {"is_error"}),
}
# What a server ran itself; in a history it is told in words.
_NOTES = (
    "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
    "bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "mcp_tool_use", "mcp_tool_result",
    "search_result", "tool_reference", "container_upload",
)  # fmt: skip
_NOTE_CHARS = 2000
_MESSAGE = Fields(
    read=frozenset({"role", "content"}),
    ignored=frozenset({"cache_control", "id"}),
    inner={"content": tuple(_BLOCKS.values())},
)
_TOOL = Fields(
    read=frozenset({"name", "description", "input_schema", "type", "strict"}),
    ignored=_CACHED | {"eager_input_streaming", "input_examples", "defer_loading"},
    neutral={"allowed_callers": (["direct"],)},
)
_CHOICE = Fields(read=frozenset({"type", "name", "disable_parallel_tool_use"}))
MESSAGES_FIELDS = sampled_fields(
    read={"messages", "system", "max_tokens", "thinking", "output_config", "output_format", "tools", "tool_choice"}
    | {"model", "stream", "stop_sequences"},
    ignored={"metadata", "service_tier", "cache_control", "inference_geo", "context_management", "betas"},
    neutral={"mcp_servers": ([],), "container": NEVER, "speed": ("standard",)},
    inner={
        "messages": (_MESSAGE,), "system": (_BLOCKS["text"], _BLOCKS["image"]), "tools": (_TOOL,),
        "tool_choice": _CHOICE, "thinking": _THINKING, "output_config": _OUTPUT, "output_format": _FORMAT,
    },
)  # fmt: skip
_TEXT = {"type": "string"}
_LINES = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
# Tools that the client runs and the model knows by name: their published schemas.
_BASH = {
    "type": "object",
    "properties": {"command": {**_TEXT, "description": "The bash command to run."}, "restart": {"type": "boolean"}},
}
_EDITOR = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
        "path": {**_TEXT, "description": "Path of a file or folder."},
        "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": {"type": "integer"},
        "insert_text": _TEXT, "view_range": _LINES,
    },
    "required": ["command", "path"],
}  # fmt: skip
_MEMORY = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
        "path": _TEXT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": {"type": "integer"},
        "insert_text": _TEXT, "view_range": _LINES, "old_path": _TEXT, "new_path": _TEXT,
    },
    "required": ["command"],
}  # fmt: skip
_PREDEFINED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "bash": (_BASH, "Run commands in a bash shell on the user's machine."),
    "text_editor": (_EDITOR, "View, create and edit files on the user's machine."),
    "memory": (_MEMORY, "View and edit files of a memory folder that lasts between conversations."),
}


@dataclass(frozen=True, slots=True)
class AnthropicEndpoint(ModelEndpoint):
    """The same with Anthropic's errors."""

    def error(self, status: int, message: str, **more: str | None) -> Mapping[str, Any]:
        return anthropic_error(status, message)


@dataclass(frozen=True, slots=True)
class MessagesEndpoint(AnthropicEndpoint):
    """Messages of one model."""

    path: str = "/v1/messages"
    fields: Fields = MESSAGES_FIELDS

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Call:
        reader, given = self.begin(body)
        model, adapter = choose_model(self.served, given)
        stream = flag_field(given, "stream")
        if "max_tokens" not in given:
            refuse("max_tokens", "is missing; this protocol needs it")
        parsed, own_format = parse_messages(self.served, given, reader, fetch)
        output = structured_output(self.served, parsed, given, own_format, reader, "output_config.format")
        params = sampling(
            given,
            {"stop": "stop_sequences"},
            max_tokens=given["max_tokens"],
            stop=given.get("stop_sequences"),
            stop_after=parsed.stop_after,
            structured=output,
        )
        require_memory(self.served, parsed.prompt, params, "messages")
        tokens = Tokens(tokenizer_of(self.served), reasoning=parsed.expected.reasoning, with_logprobs=False)
        reply = MessagesReply(parsed, model=model, family=self.served.config.family, tokens=tokens)
        return call_of(parsed, (model, adapter), reader, reply, (params,), stream=stream)


def parse_messages(
    served: Served, given: Mapping[str, Any], reader: FieldReader, fetch: Fetch | None
) -> tuple[ParsedRequest, Structured | None]:
    """The prompt of a request's given fields, and the format that its answer must have.

    Raises:
        PromptError: it cannot be rendered; the message names the place.
    """
    images = Images(served, fetch)
    body: dict[str, Any] = {"max_tokens": 1}  # the library wants one
    if "system" in given:
        body["system"] = _content(given["system"], "system", "system", images, reader)
    messages = enumerate(list_of(given.get("messages"), "messages"))
    body["messages"] = [_message(message, f"messages[{n}]", images, reader) for n, message in messages]
    if "thinking" in given:
        thinking = reader.read(given["thinking"], _THINKING, "thinking")
        kind = choice_field(thinking, "type", ("enabled", "disabled", "adaptive"), "thinking")
        budget = {"budget_tokens": 1024} if kind == "enabled" else {}  # the library wants one; max_tokens is the bound
        body["thinking"] = {"type": kind, **budget}
        body["max_tokens"] = 2048
    config = reader.read(given.get("output_config", {}), _OUTPUT, "output_config")
    if "effort" in config:
        efforts = ("low", "medium", "high", "xhigh", "max")
        body["output_config"] = {"effort": choice_field(config, "effort", efforts, "output_config")}
    own_format = _format(config.get("format", given.get("output_format")), reader)
    choice = reader.read(given.get("tool_choice", {}), _CHOICE, "tool_choice")
    kind = choice_field(choice, "type", ("auto", "any", "tool", "none"), "tool_choice") or "auto"
    continues = bool(body["messages"]) and _is_prefill(body["messages"][-1])
    parsed = parse_conversation(
        served,
        deepseek_recipe.MessagesRequest,
        body,
        images,
        tools=_tools(given, choice, reader),
        choice={"any": "required", "none": "none"}.get(kind, "auto"),
        named=text_field(choice, "name", "tool_choice") if kind == "tool" else None,
        shown_format=own_format,
        continues=continues,
        one_call=flag_field(choice, "disable_parallel_tool_use", "tool_choice"),
    )
    if parsed.thinking and continues:
        raise RequestError(
            "an answer that continues a message cannot be had with thinking; turn thinking off or leave it out",
            field="thinking",
        )
    return parsed, own_format


def _is_prefill(last: Mapping[str, Any]) -> bool:
    """Whether the last message is the beginning of the answer: text of the assistant and nothing else."""
    content = last["content"]
    blocks = [] if isinstance(content, str) else content
    return last["role"] == "assistant" and all(block["type"] == "text" for block in blocks)


def _message(message: object, where: str, images: Images, reader: FieldReader) -> dict[str, Any]:
    """One message for the library: known fields only, images as stubs."""
    given = reader.read(message, _MESSAGE, where)
    role = read_role(given, ("user", "assistant", "system"), where)
    return {"role": role, "content": _content(given.get("content", ""), f"{where}.content", role, images, reader)}


def _content(value: object, where: str, role: str, images: Images, reader: FieldReader) -> Any:
    if isinstance(value, list | tuple):
        blocks = (_block(block, f"{where}[{n}]", role, images, reader) for n, block in enumerate(value))
        return [block for block in blocks if block is not None] or ""
    return (
        value
        if isinstance(value, str)
        else refuse(where, f"must be a string or a list of blocks, not {json_kind(value)}")
    )


def _block(block: object, where: str, role: str, images: Images, reader: FieldReader) -> dict[str, Any] | None:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if isinstance(block, Mapping) and kind in _NOTES:
        done = {
            name: value for name, value in block.items() if name not in ("type", "id", "tool_use_id", "cache_control")
        }
        return {"type": "text", "text": f"[{kind}: {str(done)[:_NOTE_CHARS]}]"}
    if not isinstance(kind, str) or kind not in _BLOCKS:
        refuse(where, f"has the unknown type {str(kind)[:100]!r}; blocks are {', '.join(_BLOCKS)}")
    given = reader.read(block, _BLOCKS[kind], where)
    if kind == "redacted_thinking":
        reader.ignore(where)
        return None
    if kind == "text":
        return {"type": kind, "text": text_field(given, "text", where)}
    if kind == "thinking":
        return {"type": kind, "thinking": text_field(given, "thinking", where), "signature": ""}
    if kind == "tool_use":
        arguments = given.get("input", {})
        if isinstance(arguments, str):  # some clients keep them as they came in a stream
            try:
                arguments = parse_json_text(arguments or "{}")
            except (ValueError, RecursionError) as error:
                refuse(f"{where}.input", f"is text that is not JSON: {error}")
        if not isinstance(arguments, Mapping):
            refuse(f"{where}.input", f"must be an object, not {json_kind(arguments)}")
        names = {name: text_field(given, name, where) for name in ("id", "name")}
        return {"type": kind, **names, "input": arguments}
    if kind == "tool_result":
        call_id = text_field(given, "tool_use_id", where)
        content = _content(given.get("content", ""), f"{where}.content", role, images, reader)
        return {"type": kind, "tool_use_id": call_id, "content": content}
    source = reader.read(given.get("source"), _SOURCE, f"{where}.source")
    return _document(given, source, where) if kind == "document" else _image(source, where, role, images)


def _document(given: Mapping[str, Any], source: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The text of a document, behind its title and what is said of it."""
    kind, place = source.get("type"), f"{where}.source"
    if kind == "text":
        text = text_field(source, "data", place)
    elif kind == "content" and isinstance(source.get("content"), str):
        text = source["content"]
    elif kind == "content":
        parts = enumerate(list_of(source.get("content"), f"{place}.content"))
        text = "\n\n".join(
            text_field(part if isinstance(part, Mapping) else {}, "text", f"{place}.content[{n}]") for n, part in parts
        )
    else:
        refuse(f"{place}.type", f"is {str(kind)[:100]!r}; documents are text here, send their pages as images")
    heads = [text_field(given, name, where) for name in ("title", "context") if name in given]
    return {"type": "text", "text": "\n\n".join((*heads, text))}


def _image(source: Mapping[str, Any], where: str, role: str, images: Images) -> dict[str, Any]:
    if role not in ("user", "system"):
        refuse(where, f"is an image in a message of role {role!r}; images go to user messages")
    if source.get("type") == "base64":
        field = ".source.data"
        image: object = "data:;base64," + text_field(source, "data", f"{where}.source")
    elif source.get("type") == "url":
        field = ".source.url"
        image = images.source(text_field(source, "url", f"{where}.source"), where + field)
    else:
        refuse(f"{where}.source.type", f"is {str(source.get('type'))[:100]!r}; sources are base64 and url")
    stub = images.stubs.take(image, where, field)
    if stub is None:
        return {"type": "text", "text": IMAGE_LEFT_OUT}
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": stub}}


def _tools(given: Mapping[str, Any], choice: Mapping[str, Any], reader: FieldReader) -> tuple[Tool, ...]:
    """The functions, predefined ones that the client runs among them; those that a server runs are left out."""
    found = []
    for number, tool in enumerate(list_of(given.get("tools", []), "tools")):
        where = f"tools[{number}]"
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind in (None, "custom"):
            own = reader.read(tool, _TOOL, where)
            found.append((parse_tool(own, where, "input_schema"), where))
            continue
        known = next((known for known in _PREDEFINED if str(kind).startswith(f"{known}_2")), None)
        name = tool.get("name")
        if known is not None:
            schema, about = _PREDEFINED[known]
            found.append((parse_tool({"name": name, "description": about, "parameters": schema}, where), where))
        else:
            forced = {"type": kind} if choice.get("type") == "tool" and choice.get("name") == name else None
            leave_out_tool(kind, where, forced, reader)
    return unique_tools(found)


def _format(value: object, reader: FieldReader) -> Structured | None:
    """The format that an answer must have."""
    if value is None:
        return None
    given = reader.read(value, _FORMAT, "output_config.format")
    if given.get("type") != "json_schema" or "schema" not in given:
        refuse("output_config.format", "must have type json_schema and a schema")
    return schema_at("output_config.format.schema", given["schema"])
