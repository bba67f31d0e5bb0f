"""Ollama's own protocol: `POST /api/chat`, `/api/generate` and `/api/show`. Images stand as base64 beside a text.

What a request leaves out is as this server has it everywhere: no prompt is cut at `num_ctx`, sampling that is not
stated is the model's own, and the model thinks when it is asked to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe

from spyglass.engine.request import Structured
from spyglass.errors import NotServedError, json_kind
from spyglass.prompt.chat import IMAGE_LEFT_OUT, IMAGE_ROLES, STUB_URL
from spyglass.prompt.data_url import is_data_url
from spyglass.server.exchange import Call, Fetch, Immediate, Served
from spyglass.server.protocols.chat import CHAT_FIELDS, chat_tools
from spyglass.server.protocols.completions import prompts_of
from spyglass.server.protocols.conversation import (
    Images,
    ModelEndpoint,
    ParsedRequest,
    choose_model,
    parse_conversation,
    read_role,
    require_memory,
    structured_output,
    tokenizer_of,
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
from spyglass.server.protocols.markup import Expected
from spyglass.server.protocols.ollama_reply import LINES, OllamaReply, head
from spyglass.server.protocols.sampling import sampling, schema_at

_LATEST = ":latest"
_ROLES = ("system", "user", "assistant", "tool")
_THINK = ("low", "medium", "high", "max")
_OPTIONS = Fields(
    read=frozenset({"temperature", "top_k", "top_p", "min_p", "seed", "num_predict", "stop", "repeat_penalty"})
    | {"presence_penalty", "frequency_penalty"},
    ignored=frozenset({"num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram"})
    | {"repeat_last_n", "penalize_newline", "use_mmap", "use_mlock", "vocab_only", "f16_kv", "logits_all"}
    | {"mirostat_eta", "mirostat_tau"},
    neutral={"mirostat": (0,), "tfs_z": (1,), "typical_p": (1,)},
)
_NAMES = {  # of `SamplingParams`, as a request here has them
    **{name: f"options.{name}" for name in _OPTIONS.read},
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
}
_CALLED = Fields(read=frozenset({"name", "arguments"}), ignored=frozenset({"index"}))
_CALL = Fields(read=frozenset({"id", "function"}), ignored=frozenset({"type", "index"}), inner={"function": _CALLED})
_MESSAGE = Fields(
    read=frozenset({"role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id"}),
    ignored=frozenset({"name"}),
    inner={"tool_calls": (_CALL,)},
)
_SHARED = frozenset({"model", "stream", "think", "format", "options"})
_UNUSED = frozenset({"keep_alive", "truncate", "shift"})
_LOGPROBS: Mapping[str, tuple[object, ...]] = {"logprobs": (False,), "top_logprobs": (0,)}
_CHAT = Fields(
    read=_SHARED | {"messages", "tools"},
    ignored=_UNUSED,
    neutral=_LOGPROBS,
    inner={"messages": (_MESSAGE,), "options": _OPTIONS, "tools": CHAT_FIELDS.inner["tools"]},
)
_GENERATE = Fields(
    read=_SHARED | {"prompt", "suffix", "system", "images", "raw"},
    ignored=_UNUSED,
    neutral={**_LOGPROBS, "template": ("",), "context": ([],), "width": NEVER, "height": NEVER, "steps": NEVER},
    inner={"options": _OPTIONS},
)
_SHOW = Fields(read=frozenset({"model", "name"}), ignored=frozenset({"verbose", "system", "template", "options"}))


@dataclass(frozen=True, slots=True)
class _Ollama(ModelEndpoint):
    def error(self, status: int, message: str, **more: str | None) -> Mapping[str, Any]:
        return {"error": message}


@dataclass(frozen=True, slots=True)
class OllamaChat(_Ollama):
    """Ollama's chat."""

    path: str = "/api/chat"
    fields: Fields = _CHAT

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Call | Immediate:
        reader, given = self.begin(body)
        messages = list_of(given.get("messages", []), "messages")
        if not messages:
            return _loaded(self.served, given, body, reader, is_chat=True)
        images, plain = Images(self.served, fetch), list[dict[str, Any]]()
        for number, message in enumerate(messages):
            plain.append(_message(message, f"messages[{number}]", images, reader, plain))
        if plain[-1]["role"] == "assistant" and "tool_calls" not in plain[-1]:
            plain[-1]["prefix"] = True  # the answer goes on where it stops
        parsed = _conversation(self.served, given, plain, images, reader)
        return _call(self.served, given, parsed, reader, is_chat=True)


@dataclass(frozen=True, slots=True)
class OllamaGenerate(_Ollama):
    """Ollama's answer to one prompt."""

    path: str = "/api/generate"
    fields: Fields = _GENERATE

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Call | Immediate:
        reader, given = self.begin(body)
        text = text_field({"prompt": "", **given}, "prompt", "")
        images, seen = Images(self.served, fetch), list_of(given.get("images", []), "images")
        if not text and not seen:
            return _loaded(self.served, given, body, reader, is_chat=False)
        if flag_field(given, "raw") or given.get("suffix"):
            if seen or given.get("system") or given.get("think"):
                refuse("raw", "and suffix take a prompt as it is: leave images, system and think out")
            prompt = prompts_of(self.served, text, suffix=given.get("suffix"))[0]
            parsed = ParsedRequest(prompt=prompt, expected=Expected(tools={}), thinking=False, effort=None)
        else:
            messages = [{"role": "system", "content": given["system"]}] if given.get("system") else []
            messages.append({"role": "user", "content": _with_images(text, seen, "images", "user", images)})
            parsed = _conversation(self.served, given, messages, images, reader)
        return _call(self.served, given, parsed, reader, is_chat=False)


@dataclass(frozen=True, slots=True)
class OllamaShow(_Ollama):
    """What Ollama's clients ask of a model."""

    path: str = "/api/show"
    fields: Fields = _SHOW

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Immediate:
        reader, given = self.begin(body)
        name, _ = _model(self.served, {"model": given.get("model", given.get("name"))})
        family, text = self.served.config.family, self.served.config.text
        shown = {
            "modelfile": f"FROM {name}\n",
            "parameters": "",
            "template": "",
            "details": model_details(self.served),
            "model_info": {
                "general.architecture": family,
                f"{family}.context_length": self.served.max_length,
                f"{family}.embedding_length": text.hidden_size,
                f"{family}.block_count": len(text.layers),
            },
            "capabilities": ["completion", "tools", "thinking", *(["vision"] if self.served.config.vision else [])],
        }
        return Immediate(body=shown, ignored=reader.ignored)


def model_details(served: Served) -> dict[str, Any]:
    """What Ollama says of a model beside its name."""
    family = served.config.family
    return {"parent_model": "", "format": "safetensors", "family": family, "families": [family]} | {
        "parameter_size": "", "quantization_level": "",
    }  # fmt: skip


def _model(served: Served, given: Mapping[str, Any]) -> tuple[str, str | None]:
    """As `choose_model`; a name may end in the tag that Ollama gives to names without one."""
    name = given.get("model")
    if name is None:
        refuse("model", f"is missing; served are {', '.join((*served.names, *served.adapters))}")
    try:
        return choose_model(served, given)
    except NotServedError:
        if not isinstance(name, str) or not name.endswith(_LATEST):
            raise
    return name, choose_model(served, {"model": name.removesuffix(_LATEST)})[1]


def _loaded(
    served: Served, given: Mapping[str, Any], body: Mapping[str, Any], reader: FieldReader, *, is_chat: bool
) -> Immediate:
    """The answer to a request without a prompt, by which a client has a model loaded or unloaded; it stays here."""
    name, _ = _model(served, given)
    said = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    reason = "unload" if body.get("keep_alive") in (0, "0") else "load"
    return Immediate(body={**head(name), **said, "done": True, "done_reason": reason}, ignored=reader.ignored)


def _conversation(
    served: Served,
    given: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    images: Images,
    reader: FieldReader,
) -> ParsedRequest:
    body: dict[str, Any] = {"messages": messages}
    think = given.get("think", False)
    if isinstance(think, str):
        body["reasoning_effort"] = choice_field(given, "think", _THINK)
    elif not isinstance(think, bool):
        refuse("think", f"is {str(think)[:100]!r}, expected true, false or one of {', '.join(_THINK)}")
    body["thinking"] = {"type": "enabled" if think else "disabled"}
    return parse_conversation(
        served,
        deepseek_recipe.ChatCompletionRequest,
        body,
        images,
        tools=chat_tools(given, reader),
        shown_format=_format(given.get("format")),
        field="messages" if "messages" in given else "prompt",
    )


def _call(
    served: Served, given: Mapping[str, Any], parsed: ParsedRequest, reader: FieldReader, *, is_chat: bool
) -> Call:
    name, adapter = _model(served, given)
    options = dict(reader.read(given.get("options", {}), _OPTIONS, "options"))
    limit, stop = options.pop("num_predict", None), options.pop("stop", None)
    if "repeat_penalty" in options:
        options["repetition_penalty"] = options.pop("repeat_penalty")
    params = sampling(
        options,
        _NAMES,
        max_tokens=parsed.default_tokens if limit is None else limit if limit not in (-1, -2) else served.max_length,
        stop=stop,
        stop_after=parsed.stop_after,
        structured=structured_output(served, parsed, {}, _format(given.get("format")), reader),
    )
    require_memory(served, parsed.prompt, params, "messages" if is_chat else "prompt")
    tokens = Tokens(tokenizer_of(served), reasoning=parsed.expected.reasoning, with_logprobs=False)
    return Call(
        model=name.removesuffix(_LATEST),
        adapter=adapter,
        prompts=(parsed.prompt,),
        params=(params,),
        stream=flag_field(given, "stream", default=True),
        reply=OllamaReply(parsed, model=name, family=served.config.family, tokens=tokens, is_chat=is_chat),
        form=LINES,
        images=len(parsed.prompt.plans),
        ignored=reader.ignored,
        tools=parsed.expected.tools,
    )


def _format(value: object) -> Structured | None:
    if value in (None, ""):
        return None
    if value == "json":
        return Structured(kind="json")
    if not isinstance(value, Mapping):
        refuse("format", f"is {str(value)[:100]!r}, expected json or a JSON schema")
    return schema_at("format", value)


def _message(
    message: object, where: str, images: Images, reader: FieldReader, before: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """One message in the library's form."""
    given = reader.read(message, _MESSAGE, where)
    role = read_role(given, _ROLES, where)
    text = text_field({"content": "", **given}, "content", where)
    seen = list_of(given.get("images", []), f"{where}.images")
    found: dict[str, Any] = {"role": role, "content": _with_images(text, seen, f"{where}.images", role, images)}
    if role == "assistant" and "thinking" in given:
        found["reasoning_content"] = text_field(given, "thinking", where)
    if role == "assistant" and (calls := list_of(given.get("tool_calls", []), f"{where}.tool_calls")):
        first = sum(len(one.get("tool_calls", ())) for one in before)
        places = ((f"{where}.tool_calls[{n}]", f"call_{first + n}") for n in range(len(calls)))
        found["tool_calls"] = [_past_call(call, *place, reader) for call, place in zip(calls, places, strict=True)]
    if role == "tool":
        found["tool_call_id"] = _answered(given, where, before)
    return found


def _with_images(text: str, seen: Sequence[object], where: str, role: str, images: Images) -> Any:
    """A message's content: images before the text, as Ollama's templates have them."""
    if not seen:
        return text
    parts = []
    for number, image in enumerate(seen):
        place = f"{where}[{number}]"
        data = text_field({place: image}, place, "")
        url = data if is_data_url(data) else f"data:;base64,{data}"
        if role not in IMAGE_ROLES:
            refuse(place, f"is an image in a message of role {role!r}; images go to {', '.join(IMAGE_ROLES)}")
        stub = images.stubs.take(url, place)
        parts.append(
            {"type": "text", "text": IMAGE_LEFT_OUT}
            if stub is None
            else {"type": "image_url", "image_url": {"url": STUB_URL + stub}}
        )
    return [*parts, {"type": "text", "text": text}] if text else parts


def _past_call(call: object, where: str, call_id: str, reader: FieldReader) -> dict[str, Any]:
    given = reader.read(call, _CALL, where)
    function = reader.read(given.get("function"), _CALLED, f"{where}.function")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, Mapping):
        refuse(f"{where}.function.arguments", f"must be an object, not {json_kind(arguments)}")
    name = text_field(function, "name", f"{where}.function")
    told = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": text_field({"id": call_id, **given}, "id", where), "type": "function", "function": told}


def _answered(given: Mapping[str, Any], where: str, before: Sequence[Mapping[str, Any]]) -> str:
    """The call that a tool's message answers: by its id, else the first without an answer of that name, or of any."""
    if "tool_call_id" in given:
        return text_field(given, "tool_call_id", where)
    done = {message["tool_call_id"] for message in before if message["role"] == "tool"}
    open_calls = [call for message in before for call in message.get("tool_calls", ()) if call["id"] not in done]
    named = [call for call in open_calls if call["function"]["name"] == given.get("tool_name")]
    if not open_calls:
        refuse(where, "answers a tool call, and there is none before it that has no answer")
    return str((named or open_calls)[0]["id"])
