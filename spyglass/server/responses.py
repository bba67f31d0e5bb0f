"""OpenAI Responses: `POST /v1/responses`. Nothing is stored, so a conversation is sent whole every time."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe

from spyglass.engine.request import Delta, RequestOutput, Structured, TokenLogprob
from spyglass.errors import PromptError
from spyglass.prompt.chat import IMAGE_ROLES, STUB_URL, IMAGE_LEFT_OUT
from spyglass.server.answer import Answer, Tokens, event, failure, spell
from spyglass.server.conversation import Conversed, Pictures, choose_model, converse, form_of, tokenizer_of
from spyglass.server.exchange import Call, Fetch, Served
from spyglass.server.fields import Fields, flag_field, listed, read_fields, text_field
from spyglass.server.openai_errors import openai_error
from spyglass.server.sampling import EXTRA, FORMS, NATIVE, sampling, stated_form

_CONVERTED = frozenset(
    {"input", "instructions", "reasoning", "text", "tools", "tool_choice", "temperature", "top_p", "max_output_tokens"}
    | {"top_logprobs"}
)
RESPONSES_FIELDS = Fields(
    read=_CONVERTED | NATIVE | EXTRA | FORMS
    | {"model", "stream", "include", "parallel_tool_calls", "stop"},
    ignored=frozenset(
        {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
        | {"stream_options", "max_tool_calls"}
    ),
    fixed={"background": (False,), "truncation": ("disabled",)}
    | dict.fromkeys(("previous_response_id", "conversation", "prompt", "context_management"), ()),
)  # fmt: skip
_REASONING = Fields(read=frozenset({"effort"}), ignored=frozenset({"summary", "generate_summary"}))
_TEXT = Fields(read=frozenset({"format"}), fixed={"verbosity": ("medium",)})
_TOOL = Fields(read=frozenset({"type", "name", "description", "parameters", "strict"}))
_CHOICE = Fields(read=frozenset({"type", "name"}))
_FORMAT = Fields(read=frozenset({"type", "name", "schema", "strict"}), ignored=frozenset({"description"}))
_REASONED = Fields(read=frozenset({"type", "text"}))
_LOGPROBS = "message.output_text.logprobs"
_INCLUDE = {_LOGPROBS, "reasoning.encrypted_content"}
_ITEM = frozenset({"type", "id", "status"})
_ITEMS = {
    "message": Fields(read=_ITEM | {"role", "content"}, ignored=frozenset({"phase"})),
    "reasoning": Fields(read=_ITEM | {"content"}, ignored=frozenset({"summary", "encrypted_content"})),
    "function_call": Fields(read=_ITEM | {"call_id", "name", "arguments"}, ignored=frozenset({"namespace"})),
    "function_call_output": Fields(read=_ITEM | {"call_id", "output"}),
}
_PARTS = {
    "input_text": Fields(read=frozenset({"type", "text"})),
    "output_text": Fields(read=frozenset({"type", "text"}), ignored=frozenset({"annotations", "logprobs"})),
    "input_image": Fields(read=frozenset({"type", "image_url"}), ignored=frozenset({"detail"}), fixed={"file_id": ()}),
}


@dataclass(frozen=True, slots=True)
class ResponsesEndpoint:
    """Responses of one model."""

    served: Served
    path: str = "/v1/responses"

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Call:
        """Read a request.

        Raises:
            PromptError, NotServedError: as `Endpoint.parse`.
        """
        stated, ignored = read_fields(body, RESPONSES_FIELDS)
        model, adapter = choose_model(self.served, stated)
        plain, conversed, more = converse_responses(self.served, stated, fetch)
        form = stated_form(stated, _form(plain.get("text")), thinking=conversed.thinking)
        with_logprobs = "top_logprobs" in stated or _LOGPROBS in stated.get("include", ())
        params = sampling(
            stated,
            max_tokens=stated.get("max_output_tokens", conversed.default_tokens),
            stop=stated.get("stop"),
            stop_after=conversed.stop_after,
            logprobs=stated.get("top_logprobs", 0) if with_logprobs else None,
            structured=form_of(self.served, conversed, form),
        )
        tokens = Tokens(tokenizer_of(self.served), reasoning=conversed.expected.reasoning, with_logprobs=with_logprobs)
        reply = ResponsesReply(conversed, plain, model=model, family=self.served.config.family, tokens=tokens)
        return conversed.call(stated, (model, adapter), (params,), reply, ignored + more)

    def error(self, status: int, message: str, *, field: str | None = None) -> Mapping[str, Any]:
        """OpenAI's error body."""
        return openai_error(status, message, field)


def converse_responses(
    served: Served, stated: Mapping[str, Any], fetch: Fetch | None
) -> tuple[dict[str, Any], Conversed, tuple[str, ...]]:
    """The body as the library reads it, the conversation it makes, and further fields that were ignored.

    Raises:
        PromptError: it cannot be rendered; the message names the field.
    """
    pictures, ignored = Pictures(served, fetch), list[str]()
    plain = {name: value for name, value in stated.items() if name in _CONVERTED}
    for name, fields in (("reasoning", _REASONING), ("text", _TEXT)):
        if name in plain:
            plain[name], unused = read_fields(plain[name], fields, name)
            ignored += unused
    if "format" in plain.get("text", ()):
        plain["text"]["format"], unused = read_fields(plain["text"]["format"], _FORMAT, "text.format")
        ignored += unused
    if isinstance(plain.get("tool_choice"), Mapping):
        read_fields(plain["tool_choice"], _CHOICE, "tool_choice")
    if not isinstance(plain.get("input"), str):
        items = listed(plain.get("input"), "input")
        plain["input"] = [_item(item, f"input[{place}]", pictures, ignored) for place, item in enumerate(items)]
    for place, tool in enumerate(listed(stated.get("tools", []), "tools")):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind != "function":
            raise PromptError(f"tools[{place}].type is {kind!r}; tools are functions, this server runs none itself")
        read_fields(tool, _TOOL, f"tools[{place}]")
    for value in listed(stated.get("include", []), "include"):
        if not isinstance(value, str) or value not in _INCLUDE:
            raise PromptError(f"include has {str(value)[:100]!r}; this server has {' and '.join(sorted(_INCLUDE))}")
    one_call = not flag_field(stated, "parallel_tool_calls", default=True)
    conversed = converse(served, deepseek_recipe.ResponsesRequest, plain, pictures, one_call=one_call)
    return plain, conversed, tuple(dict.fromkeys(ignored))


def _item(item: object, where: str, pictures: Pictures, ignored: list[str]) -> dict[str, Any]:
    """One input item for the library: known fields only, pictures as stubs."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise PromptError(f"{where} has the unknown type {str(kind)[:100]!r}; items are {', '.join(_ITEMS)}")
    stated, unused = read_fields(item, _ITEMS[kind], where)
    ignored += [f"input[].{name.rpartition('.')[2]}" for name in unused]
    name, role = ("output", "tool") if kind == "function_call_output" else ("content", stated.get("role"))
    if kind in ("message", "function_call_output") and isinstance(stated.get(name), list | tuple):
        parts = enumerate(stated[name])
        stated[name] = [_part(part, f"{where}.{name}[{place}]", role, pictures, ignored) for place, part in parts]
    if kind == "reasoning":
        stated["summary"] = []  # the library wants one and reads `content`
        for place, part in enumerate(listed(stated.get("content", []), f"{where}.content")):
            read_fields(part, _REASONED, f"{where}.content[{place}]")
    return {"type": kind, **stated}


def _part(part: object, where: str, role: object, pictures: Pictures, ignored: list[str]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in _PARTS:
        raise PromptError(f"{where} has the unknown type {str(kind)[:100]!r}; parts are {', '.join(_PARTS)}")
    stated, unused = read_fields(part, _PARTS[kind], where)
    ignored += [f"input[].content[].{name.rpartition('.')[2]}" for name in unused]
    if kind != "input_image":
        text_field(stated, "text", where)
        return stated
    if role not in (*IMAGE_ROLES, "developer"):
        raise PromptError(
            f"{where} is a picture in a message of role {role!r}; pictures go to {', '.join(IMAGE_ROLES)}"
        )
    stub = pictures.stubs.take(pictures.source(stated.get("image_url"), f"{where}.image_url"), where, ".image_url")
    if stub is None:
        return {"type": "input_text", "text": IMAGE_LEFT_OUT}
    return {"type": "input_image", "image_url": STUB_URL + stub}


def _form(text: object) -> Structured | None:
    """The form of answer that `text.format` asks for; the library has checked its shape."""
    form = text.get("format") if isinstance(text, Mapping) else None
    if not isinstance(form, Mapping) or form.get("type") in (None, "text"):
        return None
    if form["type"] == "json_schema":
        return Structured(kind="json_schema", value=form.get("schema", {"type": "object"}))
    return Structured(kind="json")


class ResponsesReply:
    """Events of Responses, or its whole body."""

    def __init__(
        self, conversed: Conversed, plain: Mapping[str, Any], *, model: str, family: str, tokens: Tokens
    ) -> None:
        self._id, self._created, self._model = f"resp_{uuid.uuid4().hex}", int(time.time()), model
        self._tokens, self._prompt = tokens, conversed.prompt
        request = conversed.request

        def generator() -> Any:
            echo = deepseek_recipe.ResponsesRequest({**plain, "model": model}).echo()
            return deepseek_recipe.ResponsesRequest.chunk_generator(request, self._id, model).with_echo(echo)

        self._answer = Answer(generator, conversed, family)
        self._streams, self._number = False, 0
        self._waiting: list[TokenLogprob] = []
        self._told: list[dict[str, Any]] = []
        self._reasoned = conversed.expected.reasoning
        self._output: RequestOutput | None = None
        self._begun: dict[str, Any] = {}

    @property
    def odd(self) -> bool:
        """Whether the answer held markup that is no call."""
        return self._answer.markup.odd

    def begin(self, request_id: str) -> bytes:
        """The response as it begins."""
        self._streams = True
        return b"".join(map(self._spell, self._answer.begin()))

    def push(self, index: int, delta: Delta) -> bytes:
        """Events of one delta."""
        self._output = delta.output
        if not self._streams:
            return b""
        self._waiting += delta.logprobs or ()
        events = list(map(self._spell, self._answer.push(delta.text)))
        if delta.output is None:
            return b"".join(events)
        wrong = failure(delta.output)
        if wrong is not None:
            return b"".join((*events, self._failed(*wrong)))
        ending = self._answer.finish(delta.output)
        return b"".join((*events, *map(self._spell, ending)))

    def end(self) -> bytes:
        """Nothing: the response itself says that it is complete."""
        return b""

    def whole(self, request_id: str) -> tuple[int, Mapping[str, Any]]:
        """The response in one body."""
        output = self._output
        assert output is not None
        wrong = failure(output)
        if wrong is not None:
            return wrong[0], openai_error(*wrong)
        response = deepseek_recipe.ResponsesResponse(self._id, self._model, self._created, 0, 0)
        for chunk in self._answer.all_events(output):
            response.accumulate(chunk)
        self._tell(output.logprobs or ())
        return 200, self._complete(json.loads(response.to_json()))

    def _spell(self, chunk: Any) -> bytes:
        """An event as the library writes it, with what it does not know: log-probabilities and real usage."""
        name: str = deepseek_recipe.ResponsesResponse.sse_event_name(chunk) or ""
        text: str = chunk.to_json()
        self._number += 1
        if name == "response.created":
            self._begun = json.loads(text)["response"]
        elif name == "response.output_text.delta" and self._waiting:
            text = text.replace('"logprobs":[]', f'"logprobs":{json.dumps(self._tell(self._waiting))}', 1)
            self._waiting = []
        elif name in ("response.completed", "response.incomplete"):
            ending = json.loads(text)
            text = spell({**ending, "response": self._complete(ending["response"])})
        elif self._told and name.endswith(".done") and '"logprobs":[]' in text:
            text = spell(_with_logprobs(json.loads(text), self._told))
        return event(name, text)

    def _complete(self, response: dict[str, Any]) -> dict[str, Any]:
        assert self._output is not None
        usage = self._tokens.count(self._prompt, [self._output]).responses()
        return {**_with_logprobs(response, self._told), "usage": usage}

    def _failed(self, status: int, message: str) -> bytes:
        fault = {"code": "server_error" if status >= 500 else "invalid_prompt", "message": message}
        response = {**self._begun, "status": "failed", "error": fault}
        name = "response.failed"
        return event(name, spell({"type": name, "response": response, "sequence_number": self._number}))

    def _tell(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Log-probabilities of content; reasoning has no place for them in this protocol."""
        if not self._tokens.with_logprobs:
            return []
        ids = [entry.token_id for entry in entries]
        border = self._tokens.num_reasoning(ids) if self._reasoned else 0
        self._reasoned = self._reasoned and not self._tokens.ends_reasoning(ids)
        told = [self._tokens.logprob(entry) for entry in entries[border:]]
        self._told += told
        return told


def _with_logprobs(value: Any, told: list[dict[str, Any]]) -> Any:
    """The same with `told` wherever log-probabilities are an empty list."""
    if isinstance(value, dict):
        return {
            name: told if name == "logprobs" and item == [] else _with_logprobs(item, told)
            for name, item in value.items()
        }
    return [_with_logprobs(item, told) for item in value] if isinstance(value, list) else value
