"""OpenAI Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe

from spyglass.engine.request import Delta, RequestOutput, SamplingParams, Structured, TokenLogprob
from spyglass.errors import PromptError
from spyglass.prompt.chat import plain_part
from spyglass.server.answer import Answer, Tokens, event, failure, spell
from spyglass.server.conversation import Conversed, Pictures, choose_model, converse, form_of, tokenizer_of
from spyglass.server.exchange import Call, Fetch, Served
from spyglass.server.fields import Fields, flag_field, listed, read_fields
from spyglass.server.openai_errors import openai_error
from spyglass.server.sampling import EXTRA, FORMS, NATIVE, STREAM_OPTIONS, answers, sampling, stated_form

# What the library reads too; the others of `read` are handled here.
_CONVERTED = frozenset(
    {"messages", "thinking", "reasoning_effort", "tools", "tool_choice", "response_format", "temperature", "top_p"}
    | {"presence_penalty", "frequency_penalty", "stream", "stream_options", "stop", "logprobs", "top_logprobs"}
)
_HANDLED = frozenset({"model", "n", "max_tokens", "max_completion_tokens", "logit_bias", "parallel_tool_calls"})
CHAT_FIELDS = Fields(
    read=_CONVERTED | _HANDLED | NATIVE | EXTRA | FORMS | {"chat_template_kwargs"},
    ignored=frozenset(
        {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
        | {"prediction"}
    ),
    fixed={"modalities": (["text"],), "verbosity": ("medium",)}
    | dict.fromkeys(("functions", "function_call", "audio", "web_search_options"), ()),
)
_MESSAGE = Fields(
    read=frozenset({"role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "prefix"}),
    ignored=frozenset({"name"}),
    fixed={"refusal": (), "audio": (), "function_call": (), "annotations": ([],)},
)
_PARTS = {
    "text": Fields(read=frozenset({"type", "text"}), ignored=frozenset({"cache_control"})),
    "image_url": Fields(read=frozenset({"type", "image_url"})),
}
_PICTURE = Fields(read=frozenset({"url"}), ignored=frozenset({"detail"}))
_TOOL = Fields(read=frozenset({"type", "function"}))
_FUNCTION = Fields(read=frozenset({"name", "description", "parameters", "strict"}))
_THINKING = Fields(read=frozenset({"type"}), ignored=frozenset({"budget_tokens"}))
_FORMAT = Fields(read=frozenset({"type", "json_schema", "regex"}))
_SCHEMA = Fields(read=frozenset({"name", "description", "schema", "strict"}))
_CHOICE = Fields(read=frozenset({"type", "function"}))
_CHOSEN = Fields(read=frozenset({"name"}))
_CALL = Fields(read=frozenset({"id", "type", "function"}), ignored=frozenset({"index"}))
_CALLED = Fields(read=frozenset({"name", "arguments"}))
_TEMPLATE = Fields(read=frozenset({"thinking", "enable_thinking"}))


@dataclass(frozen=True, slots=True)
class ChatEndpoint:
    """Chat Completions of one model."""

    served: Served
    path: str = "/v1/chat/completions"

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Call:
        """Read a request.

        Raises:
            PromptError, NotServedError: as `Endpoint.parse`.
        """
        stated, ignored = read_fields(body, CHAT_FIELDS)
        model, adapter = choose_model(self.served, stated)
        stream_options, unused = read_fields(stated.get("stream_options", {}), STREAM_OPTIONS, "stream_options")
        conversed, more = converse_chat(self.served, stated, fetch)
        thinking = conversed.thinking
        form = stated_form(stated, _form(stated.get("response_format")), thinking=thinking)
        params = sampling(
            stated,
            max_tokens=stated.get("max_completion_tokens", stated.get("max_tokens", conversed.default_tokens)),
            stop=stated.get("stop"),
            stop_after=conversed.stop_after,
            logprobs=stated.get("top_logprobs", 0) if stated.get("logprobs") else None,
            structured=form_of(self.served, conversed, form),
        )
        many = answers(params, stated.get("n"))
        reply = ChatReply(
            conversed,
            many,
            model=model,
            family=self.served.config.family,
            tokens=Tokens(
                tokenizer_of(self.served),
                reasoning=conversed.expected.reasoning,
                with_logprobs=params.logprobs is not None,
            ),
            include_usage=flag_field(stream_options, "include_usage"),
        )
        return conversed.call(stated, (model, adapter), many, reply, ignored + unused + more)

    def error(self, status: int, message: str, *, field: str | None = None) -> Mapping[str, Any]:
        """OpenAI's error body."""
        return openai_error(status, message, field)


def converse_chat(served: Served, stated: Mapping[str, Any], fetch: Fetch | None) -> tuple[Conversed, tuple[str, ...]]:
    """The conversation of a request's stated fields, and further fields that were ignored.

    Raises:
        PromptError: it cannot be rendered; the message names the field.
    """
    pictures, ignored = Pictures(served, fetch), list[str]()
    plain: dict[str, Any] = {name: value for name, value in stated.items() if name in _CONVERTED}
    plain["messages"] = [
        _message(message, f"messages[{number}]", pictures, ignored)
        for number, message in enumerate(listed(stated.get("messages"), "messages"))
    ]
    for number, tool in enumerate(listed(stated.get("tools", []), "tools")):
        _check_tool(tool, f"tools[{number}]")
    if isinstance(plain.get("tool_choice"), Mapping):
        choice, _ = read_fields(plain["tool_choice"], _CHOICE, "tool_choice")
        read_fields(choice.get("function"), _CHOSEN, "tool_choice.function")
    if "chat_template_kwargs" in stated:
        plain.setdefault("thinking", _template_thinking(stated["chat_template_kwargs"]))
    if "thinking" in plain:
        plain["thinking"], unused = read_fields(plain["thinking"], _THINKING, "thinking")
        ignored += unused
    if "response_format" in plain:
        form, _ = read_fields(plain["response_format"], _FORMAT, "response_format")
        if "json_schema" in form:
            form["json_schema"], _ = read_fields(form["json_schema"], _SCHEMA, "response_format.json_schema")
        plain["response_format"] = form
    _check_effort(plain)
    conversed = converse(
        served,
        deepseek_recipe.ChatCompletionRequest,
        plain,
        pictures,
        one_call=not flag_field(stated, "parallel_tool_calls", default=True),
    )
    return conversed, tuple(dict.fromkeys(ignored))


def _message(message: object, where: str, pictures: Pictures, ignored: list[str]) -> dict[str, Any]:
    """One message for the library: known fields only, pictures as stubs."""
    stated, unused = read_fields(message, _MESSAGE, where)
    ignored += [f"messages[].{name.rpartition('.')[2]}" for name in unused]
    role = stated.get("role")
    if role == "developer":  # the newer name of the same role
        stated["role"] = role = "system"
    if "reasoning" in stated:  # what some servers call it
        stated.setdefault("reasoning_content", stated.pop("reasoning"))
    if "tool_calls" in stated:
        calls = enumerate(listed(stated["tool_calls"], f"{where}.tool_calls"))
        stated["tool_calls"] = [_call(call, f"{where}.tool_calls[{place}]") for place, call in calls]
    content = stated.get("content")
    if isinstance(content, list | tuple):
        stated["content"] = [
            _part(part, f"{where}.content[{place}]", role, pictures, ignored) for place, part in enumerate(content)
        ]
    return stated


def _part(part: object, where: str, role: object, pictures: Pictures, ignored: list[str]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in _PARTS:
        part, unused = read_fields(part, _PARTS[kind], where)
        if isinstance(part.get("image_url"), Mapping):
            picture, more = read_fields(part["image_url"], _PICTURE, f"{where}.image_url")
            part["image_url"] = {"url": pictures.source(picture.get("url"), f"{where}.image_url.url")}
            unused += more
        elif "image_url" in part:
            part["image_url"] = pictures.source(part["image_url"], f"{where}.image_url")
        ignored += [f"messages[].content[].{name.rpartition('.')[2]}" for name in unused]
    return plain_part(part, where, role, pictures.stubs)


def _call(call: object, where: str) -> dict[str, Any]:
    stated, _ = read_fields(call, _CALL, where)
    read_fields(stated.get("function"), _CALLED, f"{where}.function")
    return stated


def _check_tool(tool: object, where: str) -> None:
    stated, _ = read_fields(tool, _TOOL, where)
    if stated.get("type") != "function":
        raise PromptError(f"{where}.type is {stated.get('type')!r}; tools are functions")
    read_fields(stated.get("function"), _FUNCTION, f"{where}.function")


def _template_thinking(value: object) -> dict[str, str]:
    stated, _ = read_fields(value, _TEMPLATE, "chat_template_kwargs")
    return {"type": "enabled" if True in {flag_field(stated, name) for name in stated} else "disabled"}


def _check_effort(body: Mapping[str, Any]) -> None:
    """The library drops an effort in silence when thinking is switched off beside it."""
    thinking, effort = body.get("thinking"), body.get("reasoning_effort", "none")
    if isinstance(thinking, Mapping) and thinking.get("type") == "disabled" and effort != "none":
        raise PromptError(f"reasoning_effort {effort!r} needs thinking; leave one of the two out")


def _form(value: object) -> Structured | None:
    """The form of answer that `response_format` asks for; the library has checked its shape."""
    if not isinstance(value, Mapping) or value.get("type") in (None, "text"):
        return None
    if value["type"] == "json_schema":
        return Structured(kind="json_schema", value=value["json_schema"].get("schema", {"type": "object"}))
    if value["type"] == "regex":
        return Structured(kind="regex", value=value["regex"])
    return Structured(kind="json")


class ChatReply:
    """Chunks of Chat Completions, or its whole body."""

    def __init__(
        self,
        conversed: Conversed,
        params: Sequence[SamplingParams],
        *,
        model: str,
        family: str,
        tokens: Tokens,
        include_usage: bool,
    ) -> None:
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self._model, self._tokens, self._prompt, self._include_usage = model, tokens, conversed.prompt, include_usage
        request = conversed.request

        def generator() -> Any:
            return deepseek_recipe.ChatCompletionRequest.chunk_generator(request, self._id, model)

        self._answers = [Answer(generator, conversed, family) for _ in params]
        self._streams = False
        self._waiting: list[list[TokenLogprob]] = [[] for _ in params]
        self._reasoned: list[bool] = [conversed.expected.reasoning] * len(params)
        self._outputs: dict[int, RequestOutput] = {}

    @property
    def odd(self) -> bool:
        """Whether an answer held markup that is no call."""
        return any(answer.markup.odd for answer in self._answers)

    def begin(self, request_id: str) -> bytes:
        """The role of every answer."""
        self._streams = True
        return b"".join(
            self._spell(index, chunk) for index, answer in enumerate(self._answers) for chunk in answer.begin()
        )

    def push(self, index: int, delta: Delta) -> bytes:
        """Chunks of one delta."""
        if delta.output is not None:
            self._outputs[index] = delta.output
        if not self._streams:
            return b""
        answer = self._answers[index]
        self._waiting[index] += delta.logprobs or ()
        events = [self._spell(index, chunk) for chunk in answer.push(delta.text)]
        if delta.output is None:
            return b"".join(events)
        wrong = failure(delta.output)
        if wrong is not None:
            return b"".join((*events, event(None, spell(openai_error(*wrong)))))
        ending = answer.finish(delta.output)
        return b"".join((*events, *(self._spell(index, chunk, last=chunk is ending[-1]) for chunk in ending)))

    def end(self) -> bytes:
        """Usage, if it was asked for, and the end of the stream."""
        usage = b""
        if self._include_usage:
            counts = self._tokens.count(self._prompt, list(self._outputs.values()))
            usage = event(None, spell({**self._head("chat.completion.chunk"), "choices": [], "usage": counts.chat()}))
        return usage + b"data: [DONE]\n\n"

    def whole(self, request_id: str) -> tuple[int, Mapping[str, Any]]:
        """All answers in one body."""
        outputs = [self._outputs[index] for index in range(len(self._answers))]
        wrong = next(filter(None, map(failure, outputs)), None)
        if wrong is not None:
            return wrong[0], openai_error(*wrong)
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        counts = self._tokens.count(self._prompt, outputs)
        return 200, {**self._head("chat.completion"), "choices": choices, "usage": counts.chat()}

    def _choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        response = deepseek_recipe.ChatCompletionResponse(self._id, self._model, self._created, 0, 0)
        for chunk in self._answers[index].all_events(output):
            response.accumulate(chunk)
        choice: dict[str, Any] = json.loads(response.to_json())["choices"][0]
        return {**choice, "index": index, "logprobs": self._logprobs(index, output.logprobs)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _spell(self, index: int, chunk: Any, *, last: bool = False) -> bytes:
        """A chunk as the library writes it, with what it does not know: number, log-probabilities, real usage."""
        text: str = chunk.to_json()
        if last:
            chunk = json.loads(text)
            del chunk["usage"]
            text = spell(chunk)
        if index:
            text = text.replace('"choices":[{"index":0,', f'"choices":[{{"index":{index},', 1)
        if self._waiting[index]:
            waiting, self._waiting[index] = self._waiting[index], []
            text = text.replace('"logprobs":null', f'"logprobs":{spell(self._logprobs(index, waiting) or {})}', 1)
        return event(None, text)

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        """Reasoning apart from content, as the makers' service does; `_reasoned` carries the border over chunks."""
        if entries is None or not self._tokens.with_logprobs:
            return None
        ids = [entry.token_id for entry in entries]
        border = self._tokens.num_reasoning(ids) if self._reasoned[index] else 0
        self._reasoned[index] = self._reasoned[index] and not self._tokens.ends_reasoning(ids)
        told = [self._tokens.logprob(entry) for entry in entries]
        return {"content": told[border:], "reasoning_content": told[:border]} if border else {"content": told}
