"""OpenAI Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe

from spyglass.engine.request import Structured
from spyglass.errors import json_kind
from spyglass.prompt.chat import plain_part
from spyglass.server.exchange import Call, Fetch, Served
from spyglass.server.protocols.called import CALL, answered_call, called
from spyglass.server.protocols.chat_reply import ChatReply
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
from spyglass.server.protocols.sampling import (
    STREAM_OPTIONS,
    answers,
    limit_field,
    sampled_fields,
    sampling,
    schema_at,
    token_limit,
)

_IMAGE = Fields(read=frozenset({"url"}), ignored=frozenset({"detail", "format"}))
_PARTS = {
    "text": Fields(read=frozenset({"type", "text"}), ignored=frozenset({"cache_control"})),
    "image_url": Fields(
        read=frozenset({"type", "image_url"}),
        ignored=frozenset({"cache_control", "uuid"}),
        inner={"image_url": _IMAGE},
    ),
}
_OF_RESPONSES = {"input_text": "text", "output_text": "text", "input_image": "image_url"}  # parts by their names there
_MESSAGE = Fields(
    read=frozenset({"role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "prefix"})
    | {"function_call"},
    ignored=frozenset({"name", "cache_control", "reasoning_details", "id", "timestamp", "refusal", "annotations"}),
    neutral={"audio": NEVER, "images": ([],), "tools": ([],)},
    inner={"content": tuple(_PARTS.values()), "tool_calls": (CALL,)},
)
_FUNCTION = Fields(
    read=frozenset({"name", "description", "parameters", "strict"}), ignored=frozenset({"cache_control"})
)
_TOOL = Fields(
    read=frozenset({"type", "function"}), ignored=frozenset({"cache_control"}), inner={"function": _FUNCTION}
)
_SCHEMA = Fields(read=frozenset({"schema", "strict"}), ignored=frozenset({"name", "description"}))
_FORMAT = Fields(read=frozenset({"type", "json_schema", "regex", "schema"}), inner={"json_schema": _SCHEMA})
_CHOSEN = Fields(read=frozenset({"name"}))
_CHOICE = Fields(read=frozenset({"type", "function"}), inner={"function": _CHOSEN})
_REASONING = Fields(read=frozenset({"effort", "enabled"}), ignored=frozenset({"exclude", "max_tokens", "summary"}))
_THINKING = Fields(read=frozenset({"type"}), ignored=frozenset({"budget_tokens", "display"}))
_TEMPLATE = Fields(read=frozenset({"thinking", "enable_thinking"}))
CHAT_FIELDS = sampled_fields(
    read={"messages", "thinking", "reasoning_effort", "tools", "tool_choice", "parallel_tool_calls", "response_format"}
    | {"model", "n", "max_tokens", "max_completion_tokens", "logit_bias", "stop", "logprobs", "top_logprobs"}
    | {"stream", "stream_options", "chat_template_kwargs", "reasoning", "enable_thinking"},
    ignored={"metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"prediction", "cache_control", "context_management", "client_metadata", "return_progress"},
    neutral={
        "modalities": (["text"],), "verbosity": ("medium",), "functions": ([],),
        "function_call": ("none", "auto"), "audio": NEVER, "web_search_options": NEVER, "echo": (False,),
        "add_special_tokens": (False,), "moderation": NEVER,
    },
    inner={
        "messages": (_MESSAGE,), "tools": (_TOOL,), "tool_choice": _CHOICE,
        "thinking": _THINKING, "reasoning": _REASONING, "response_format": _FORMAT,
        "chat_template_kwargs": _TEMPLATE, "stream_options": STREAM_OPTIONS,
    },
)  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "latest_reminder")


@dataclass(frozen=True, slots=True)
class ChatEndpoint(ModelEndpoint):
    """Chat Completions of one model."""

    path: str = "/v1/chat/completions"
    fields: Fields = CHAT_FIELDS

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Call:
        reader, given = self.begin(body)
        model, adapter = choose_model(self.served, given)
        stream = flag_field(given, "stream")
        stream_options = reader.read(given.get("stream_options", {}), STREAM_OPTIONS, "stream_options")
        parsed, own_format = parse_chat(self.served, given, reader, fetch)
        output = structured_output(self.served, parsed, given, own_format, reader, "response_format")
        with_logprobs = flag_field(given, "logprobs")
        if given.get("top_logprobs") and not with_logprobs:
            refuse("top_logprobs", "needs logprobs: logprobs must be set to true")
        logprobs = given.get("top_logprobs", 0) if with_logprobs else None
        limits = ("max_completion_tokens", "max_tokens")
        params = sampling(
            given,
            {"max_tokens": limit_field(given, limits), "logprobs": "top_logprobs"},
            max_tokens=token_limit(given, limits, parsed.default_tokens, logprobs=logprobs),
            stop=given.get("stop"),
            stop_after=parsed.stop_after,
            logprobs=logprobs,
            structured=output,
        )
        require_memory(self.served, parsed.prompt, params, "messages")
        each = answers(params, given.get("n"))
        tokens = Tokens(tokenizer_of(self.served), reasoning=parsed.expected.reasoning, with_logprobs=with_logprobs)
        reply = ChatReply(
            parsed,
            len(each),
            model=model,
            family=self.served.config.family,
            tokens=tokens,
            include_usage=flag_field(stream_options, "include_usage", "stream_options"),
            usage_in_each=flag_field(stream_options, "continuous_usage_stats", "stream_options"),
        )
        return call_of(parsed, (model, adapter), reader, reply, each, stream=stream)


def parse_chat(
    served: Served, given: Mapping[str, Any], reader: FieldReader, fetch: Fetch | None
) -> tuple[ParsedRequest, Structured | None]:
    """The prompt of a request's given fields, and the format of answer that `response_format` asks for.

    Raises:
        PromptError: it cannot be rendered; the message names the place.
    """
    images, messages = Images(served, fetch), list[dict[str, Any]]()
    for number, message in enumerate(list_of(given.get("messages"), "messages", least=1)):
        messages.append(_message(message, f"messages[{number}]", images, reader, messages))
    body: dict[str, Any] = {"messages": messages}
    asked = reader.read(given.get("reasoning", {}), _REASONING, "reasoning")  # as routers of many models have it
    effort = choice_field(given, "reasoning_effort", EFFORTS) or choice_field(asked, "effort", EFFORTS, "reasoning")
    thinking = _thinking(given, asked, reader)
    if thinking is not None:
        body["thinking"] = {"type": thinking}
    if effort is not None:
        body["reasoning_effort"] = effort
    if thinking == "disabled" and effort not in (None, "none"):  # the library would drop it in silence
        refuse("reasoning_effort", f"{effort!r} needs thinking; leave one of the two out", "reasoning_effort")
    choice, named = _tool_choice(given.get("tool_choice", "auto"), reader)
    own_format = _format(given.get("response_format"), reader)
    parsed = parse_conversation(
        served,
        deepseek_recipe.ChatCompletionRequest,
        body,
        images,
        tools=chat_tools(given, reader),
        choice=choice,
        named=named,
        shown_format=own_format,
        one_call=not flag_field(given, "parallel_tool_calls", default=True),
    )
    return parsed, own_format


def _message(
    message: object, where: str, images: Images, reader: FieldReader, before: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """One message for the library: known fields only, images as stubs, what is left out as what it means."""
    given = reader.read(message, _MESSAGE, where)
    role = read_role(given, _ROLES, where)
    role = {"developer": "system", "function": "tool"}.get(role, role)  # functions are what tools were first called
    found: dict[str, Any] = {"role": role}
    reasoning = given.get("reasoning_content", given.get("reasoning"))  # the latter is what some servers call it
    if role == "assistant" and reasoning is not None:
        found["reasoning_content"] = text_field({"reasoning_content": reasoning}, "reasoning_content", where)
    if role == "assistant" and flag_field(given, "prefix", where):
        found["prefix"] = True
    calls = list_of(given.get("tool_calls", []), f"{where}.tool_calls") if role == "assistant" else []
    if role == "assistant" and not calls and "function_call" in given:
        calls = [{"function": given["function_call"]}]
    if calls:
        found["tool_calls"] = [called(call, f"{where}.tool_calls[{n}]", reader) for n, call in enumerate(calls)]
    if role == "tool":
        found["tool_call_id"] = answered_call(given, where, before)
    content = given.get("content")
    if isinstance(content, list | tuple):
        parts = enumerate(content)
        content = [_part(part, f"{where}.content[{n}]", role, images, reader) for n, part in parts]
    elif content is not None and not isinstance(content, str):
        refuse(f"{where}.content", f"must be a string or a list of parts, not {json_kind(content)}")
    found["content"] = content if content is not None or calls else ""
    return found


def _part(part: object, where: str, role: str, images: Images, reader: FieldReader) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and isinstance(kind, str) and kind in _OF_RESPONSES:
        kind = _OF_RESPONSES[kind]
        part = {**part, "type": kind}
    if isinstance(kind, str) and kind in _PARTS:
        part = reader.read(part, _PARTS[kind], where)
        if isinstance(part.get("image_url"), Mapping):
            image = reader.read(part["image_url"], _IMAGE, f"{where}.image_url")
            part["image_url"] = {"url": images.source(image.get("url"), f"{where}.image_url.url")}
        elif "image_url" in part:
            part["image_url"] = images.source(part["image_url"], f"{where}.image_url")
    elif isinstance(part, Mapping):
        refuse(where, f"has the unknown type {str(kind)[:100]!r}; parts are text or image_url")
    return plain_part(part, where, role, images.stubs)


def chat_tools(given: Mapping[str, Any], reader: FieldReader) -> tuple[Tool, ...]:
    """The functions among the tools of a request, in the form that OpenAI gave them; others are left out.

    Raises:
        RequestError: a tool that is none, or that must be called and is left out.
    """
    found = []
    for number, tool in enumerate(list_of(given.get("tools", []), "tools")):
        where = f"tools[{number}]"
        kind = tool.get("type", "function") if isinstance(tool, Mapping) else "function"
        if kind != "function":
            leave_out_tool(kind, where, given.get("tool_choice"), reader)
            continue
        inner = reader.read(tool, _TOOL, where).get("function")
        where += ".function"
        function = reader.read(inner, _FUNCTION, where)
        found.append((parse_tool(function, where), where))
    return unique_tools(found)


def _tool_choice(value: object, reader: FieldReader) -> tuple[str, str | None]:
    """One of CHOICES, and the name of the only tool that may be called."""
    if isinstance(value, Mapping):
        if value.get("type") == "allowed_tools":
            refuse("tool_choice", ALLOWED_TOOLS)
        chosen = reader.read(value, _CHOICE, "tool_choice")
        function = reader.read(chosen.get("function"), _CHOSEN, "tool_choice.function")
        return "required", text_field(function, "name", "tool_choice.function")
    return choice_field({"tool_choice": value}, "tool_choice", CHOICES) or "auto", None


def _thinking(given: Mapping[str, Any], asked: Mapping[str, Any], reader: FieldReader) -> str | None:
    """What the field of this protocol says, else what other engines' fields say."""
    template = reader.read(given.get("chat_template_kwargs", {}), _TEMPLATE, "chat_template_kwargs")
    flags = {flag_field(template, name, "chat_template_kwargs") for name in template}
    flags |= {flag_field(given, name) for name in ("enable_thinking",) if name in given}
    flags |= {flag_field(asked, name, "reasoning") for name in ("enabled",) if name in asked}
    if "thinking" in given:
        inner = reader.read(given["thinking"], _THINKING, "thinking")
        return choice_field(inner, "type", ("enabled", "disabled", "adaptive", "auto"), "thinking")
    return None if not flags else "enabled" if True in flags else "disabled"


def _format(value: object, reader: FieldReader) -> Structured | None:
    """The format of answer that `response_format` asks for."""
    if value is None:
        return None
    given = reader.read(value, _FORMAT, "response_format")
    kind = choice_field(given, "type", ("text", "json_object", "json_schema", "regex"), "response_format")
    if kind == "json_schema":
        place = "response_format.json_schema"
        if "json_schema" not in given and "schema" in given:  # as llama.cpp and others have it
            return schema_at("response_format.schema", given["schema"])
        inner = reader.read(given.get("json_schema"), _SCHEMA, place)
        flag_field(inner, "strict", place)  # without effect: an answer fits its schema anyway
        if "schema" not in inner:
            refuse(f"{place}.schema", "is missing")
        return schema_at(f"{place}.schema", inner["schema"])
    if kind == "json_object" and "schema" in given:  # as llama.cpp and others have it
        return schema_at("response_format.schema", given["schema"])
    if kind == "regex":
        return schema_at("response_format.regex", text_field(given, "regex", "response_format"), "regex")
    return Structured(kind="json") if kind == "json_object" else None
