"""Anthropic Messages: `POST /v1/messages`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import deepseek_recipe

from spyglass.engine.request import Delta, RequestOutput, Structured
from spyglass.errors import PromptError
from spyglass.prompt.chat import IMAGE_LEFT_OUT
from spyglass.server.answer import Answer, Tokens, event, failure, spell
from spyglass.server.conversation import Conversed, Pictures, choose_model, converse, form_of, tokenizer_of
from spyglass.server.exchange import Call, Fetch, Served
from spyglass.server.fields import Fields, flag_field, listed, read_fields, text_field
from spyglass.server.sampling import EXTRA, FORMS, NATIVE, sampling, stated_form

_CONVERTED = frozenset(
    {"messages", "system", "max_tokens", "thinking", "output_config", "tools", "tool_choice", "temperature", "top_p"}
)
MESSAGES_FIELDS = Fields(
    read=_CONVERTED | NATIVE | EXTRA | FORMS | {"model", "stream", "stop_sequences", "output_format"},
    ignored=frozenset({"metadata", "service_tier", "cache_control", "inference_geo"}),
    fixed={"mcp_servers": ([],), "container": (), "context_management": ()},
)
_THINKING = Fields(read=frozenset({"type"}), ignored=frozenset({"budget_tokens", "display"}))
_OUTPUT = Fields(read=frozenset({"effort", "format"}))
_FORMAT = Fields(read=frozenset({"type", "schema"}))
_MESSAGE = Fields(read=frozenset({"role", "content"}))
_CACHED = frozenset({"cache_control"})
_BLOCKS = {
    "text": Fields(read=frozenset({"type", "text"}), ignored=_CACHED, fixed={"citations": ([],)}),
    "image": Fields(read=frozenset({"type", "source"}), ignored=_CACHED),
    "thinking": Fields(read=frozenset({"type", "thinking", "signature"}), ignored=_CACHED),
    "tool_use": Fields(read=frozenset({"type", "id", "name", "input"}), ignored=_CACHED | {"caller"}),
    "tool_result": Fields(read=frozenset({"type", "tool_use_id", "content"}), ignored=_CACHED | {"is_error"}),
}
_SOURCE = Fields(read=frozenset({"type", "url", "data"}), ignored=frozenset({"media_type"}))
_TOOL = Fields(
    read=frozenset({"name", "description", "input_schema", "strict", "type"}),
    ignored=_CACHED | {"eager_input_streaming"},
    fixed={"defer_loading": (False,), "input_examples": ([],), "allowed_callers": (["direct"],)},
)
_CHOICE = Fields(read=frozenset({"type", "name", "disable_parallel_tool_use"}))
_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MessagesEndpoint:
    """Messages of one model."""

    served: Served
    path: str = "/v1/messages"

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Call:
        """Read a request.

        Raises:
            PromptError, NotServedError: as `Endpoint.parse`.
        """
        stated, ignored = read_fields(body, MESSAGES_FIELDS)
        model, adapter = choose_model(self.served, stated)
        if "max_tokens" not in stated:
            raise PromptError("max_tokens is missing; this protocol needs it")
        conversed, schema, more = converse_messages(self.served, stated, fetch)
        form = None if schema is None else Structured(kind="json_schema", value=schema)
        form = stated_form(stated, form, thinking=conversed.thinking)
        params = sampling(
            stated,
            max_tokens=stated["max_tokens"],
            stop=stated.get("stop_sequences"),
            stop_after=conversed.stop_after,
            structured=form_of(self.served, conversed, form),
        )
        tokens = Tokens(tokenizer_of(self.served), reasoning=conversed.expected.reasoning, with_logprobs=False)
        reply = MessagesReply(conversed, model=model, family=self.served.config.family, tokens=tokens)
        return conversed.call(stated, (model, adapter), (params,), reply, ignored + more)

    def error(self, status: int, message: str, *, field: str | None = None) -> Mapping[str, Any]:
        """Anthropic's error body."""
        return anthropic_error(status, message)


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """An error as Anthropic's clients read it."""
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def converse_messages(
    served: Served, stated: Mapping[str, Any], fetch: Fetch | None
) -> tuple[Conversed, Any, tuple[str, ...]]:
    """The conversation of a request, the schema its answer must have, and further fields that were ignored.

    Raises:
        PromptError: it cannot be rendered; the message names the field.
    """
    pictures, ignored = Pictures(served, fetch), list[str]()
    plain: dict[str, Any] = {name: value for name, value in stated.items() if name in _CONVERTED}
    plain.setdefault("max_tokens", 1)  # counting needs none
    if isinstance(plain.get("system"), list | tuple):
        plain["system"] = [
            _block(b, f"system[{n}]", "system", pictures, ignored) for n, b in enumerate(plain["system"])
        ]
    messages = listed(stated.get("messages"), "messages")
    plain["messages"] = [_message(message, f"messages[{n}]", pictures, ignored) for n, message in enumerate(messages)]
    if "thinking" in plain:
        plain["thinking"], unused = read_fields(plain["thinking"], _THINKING, "thinking")
        ignored += unused
        if plain["thinking"].get("type") == "enabled":
            plain["thinking"]["budget_tokens"] = 1024  # the library wants one; max_tokens is the bound here
    config, _ = read_fields(plain.pop("output_config", {}), _OUTPUT, "output_config")
    if "effort" in config:
        plain["output_config"] = {"effort": config["effort"]}
    schema = _schema(config.get("format", stated.get("output_format")))
    changed: dict[str, Any] = {} if schema is None else {"response_schema": schema}
    tools = listed(stated.get("tools", []), "tools")
    if tools:
        plain["tools"] = [_tool(tool, f"tools[{n}]", ignored) for n, tool in enumerate(tools)]
    choice, _ = read_fields(stated.get("tool_choice", {}), _CHOICE, "tool_choice")
    one_call = flag_field(choice, "disable_parallel_tool_use")
    choice.pop("disable_parallel_tool_use", None)
    if choice.get("type") == "any":  # the library reads it as "auto"
        changed["tool_choice"] = "required"
    elif choice:
        plain["tool_choice"] = choice
    continues = bool(messages) and _is_prefill(plain["messages"][-1])
    conversed = converse(
        served,
        deepseek_recipe.MessagesRequest,
        plain,
        pictures,
        changed=changed,
        continues=continues,
        one_call=one_call,
    )
    if conversed.thinking and continues:
        raise PromptError(
            "an answer that continues a message cannot be had with thinking; turn thinking off or leave it out"
        )
    return conversed, schema, tuple(dict.fromkeys(ignored))


def _is_prefill(last: Mapping[str, Any]) -> bool:
    """Whether the last message is the beginning of the answer: text of the assistant and nothing else."""
    content = last.get("content")
    blocks = [] if isinstance(content, str) else listed(content, "content")
    return last.get("role") == "assistant" and all(block["type"] == "text" for block in blocks)


def _message(message: object, where: str, pictures: Pictures, ignored: list[str]) -> dict[str, Any]:
    """One message for the library: known fields only, pictures as stubs."""
    stated, _ = read_fields(message, _MESSAGE, where)
    role, content = stated.get("role"), stated.get("content")
    if isinstance(content, list | tuple):
        blocks = enumerate(content)
        stated["content"] = [_block(b, f"{where}.content[{n}]", role, pictures, ignored) for n, b in blocks]
    return stated


def _block(block: object, where: str, role: object, pictures: Pictures, ignored: list[str]) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str) or kind not in _BLOCKS:
        raise PromptError(f"{where} has the unknown type {str(kind)[:100]!r}; blocks are {', '.join(_BLOCKS)}")
    stated, unused = read_fields(block, _BLOCKS[kind], where)
    ignored += [f"content[].{name.rpartition('.')[2]}" for name in unused]
    if kind == "text":
        text_field(stated, "text", where)
    if kind == "tool_use" and not isinstance(stated.get("input"), Mapping):
        raise PromptError(f"{where}.input must be an object, not {type(stated.get('input')).__name__}")
    if kind == "image":
        return _image(stated, where, role, pictures)
    if kind == "tool_result" and isinstance(stated.get("content"), list | tuple):
        inner = enumerate(stated["content"])
        stated["content"] = [_block(b, f"{where}.content[{n}]", role, pictures, ignored) for n, b in inner]
    return stated


def _image(stated: Mapping[str, Any], where: str, role: object, pictures: Pictures) -> dict[str, Any]:
    if role not in ("user", "system"):
        raise PromptError(f"{where} is a picture in a message of role {role!r}; pictures go to user messages")
    source, _ = read_fields(stated.get("source"), _SOURCE, f"{where}.source")
    if source.get("type") == "base64":
        field = ".source.data"
        picture: object = "data:;base64," + text_field(source, "data", f"{where}.source")
    elif source.get("type") == "url":
        field = ".source.url"
        picture = pictures.source(text_field(source, "url", f"{where}.source"), where + field)
    else:
        raise PromptError(f"{where}.source.type is {str(source.get('type'))[:100]!r}; sources are base64 and url")
    stub = pictures.stubs.take(picture, where, field)
    if stub is None:
        return {"type": "text", "text": IMAGE_LEFT_OUT}
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": stub}}


def _tool(tool: object, where: str, ignored: list[str]) -> dict[str, Any]:
    stated, unused = read_fields(tool, _TOOL, where)
    ignored += [f"tools[].{name.rpartition('.')[2]}" for name in unused]
    if stated.pop("type", "custom") != "custom":
        raise PromptError(f"{where} is a tool that the server would have to run; this one runs none, name it by schema")
    return stated


def _schema(value: object) -> Any:
    """The schema of a form of answer."""
    if value is None:
        return None
    stated, _ = read_fields(value, _FORMAT, "the form of answer")
    if stated.get("type") != "json_schema" or "schema" not in stated:
        raise PromptError("the form of answer must have type json_schema and a schema")
    return stated["schema"]


class MessagesReply:
    """Events of Messages, or its whole body."""

    def __init__(self, conversed: Conversed, *, model: str, family: str, tokens: Tokens) -> None:
        self._id, self._model = f"msg_{uuid.uuid4().hex}", model
        self._tokens, self._prompt = tokens, conversed.prompt
        request = conversed.request

        def generator() -> Any:
            return deepseek_recipe.MessagesRequest.chunk_generator(request, self._id, model)

        self._answer = Answer(generator, conversed, family)
        self._streams = False
        self._output: RequestOutput | None = None

    @property
    def odd(self) -> bool:
        """Whether the answer held markup that is no call."""
        return self._answer.markup.odd

    def begin(self, request_id: str) -> bytes:
        """The message as it begins."""
        self._streams = True
        return b"".join(map(self._spell, self._answer.begin()))

    def push(self, index: int, delta: Delta) -> bytes:
        """Events of one delta."""
        self._output = delta.output
        if not self._streams:
            return b""
        events = list(map(self._spell, self._answer.push(delta.text)))
        if delta.output is None:
            return b"".join(events)
        wrong = failure(delta.output)
        if wrong is not None:
            return b"".join((*events, event("error", spell(anthropic_error(*wrong)))))
        ending = self._answer.finish(delta.output)
        return b"".join((*events, *map(self._spell, ending)))

    def end(self) -> bytes:
        """Nothing: the message has said that it stops."""
        return b""

    def whole(self, request_id: str) -> tuple[int, Mapping[str, Any]]:
        """The message in one body."""
        output = self._output
        assert output is not None
        wrong = failure(output)
        if wrong is not None:
            return wrong[0], anthropic_error(*wrong)
        response = deepseek_recipe.MessagesResponse(self._id, self._model, 0, 0, 0)
        for chunk in self._answer.all_events(output):
            response.accumulate(chunk)
        message = json.loads(response.to_json())
        return 200, {**message, **self._stop(message), "usage": self._usage(message["usage"])}

    def _spell(self, chunk: Any) -> bytes:
        """An event as the library writes it; the last but one also tells real usage and the stop sequence."""
        name: str = deepseek_recipe.MessagesResponse.sse_event_name(chunk) or ""
        text: str = chunk.to_json()
        if name == "message_delta":
            ending = json.loads(text)
            ending["delta"] |= self._stop(ending["delta"])
            ending["usage"] = self._usage(ending["usage"])
            text = spell(ending)
        return event(name, text)

    def _usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        assert self._output is not None
        return {**usage, **self._tokens.count(self._prompt, [self._output]).messages()}

    def _stop(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Why the message stopped; the library does not see stop sequences."""
        assert self._output is not None
        if self._output.stopped_by is None or message["stop_reason"] == "tool_use":
            return {}
        return {"stop_reason": "stop_sequence", "stop_sequence": self._output.stopped_by}
