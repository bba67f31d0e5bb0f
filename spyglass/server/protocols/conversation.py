"""What the three chat protocols share: messages become a prompt, tools and formats say what its answer may hold.

The library of the model makers reads messages and puts them in order; tools, the choice among them and formats of the
answer are read here and given to it as they are. Images are taken out before (`ImageStubs`) and come back after.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe

from spyglass.engine.request import THINK_END, SamplingParams, Structured
from spyglass.errors import CapacityError, NotServedError, PromptError, json_kind
from spyglass.prompt.build import prompt_from_chat
from spyglass.prompt.chat import ImageStubs, convert_request, render_conversation
from spyglass.prompt.tokenizer import PromptTokenizer
from spyglass.prompt.tokens import Prompt
from spyglass.server.errors import TooLongError, openai_error
from spyglass.server.exchange import Call, Fetch, Reply, Served
from spyglass.server.protocols.fields import (
    FieldReader,
    Fields,
    RequestError,
    choice_field,
    flag_field,
    refuse,
    text_field,
)
from spyglass.server.protocols.markup import Expected
from spyglass.server.protocols.sampling import asked_format
from spyglass.server.protocols.tags import DSML
from spyglass.server.protocols.tool_grammar import calls_grammar

_JSON = ("json", "json_schema")
_DEFAULT_TOKENS, _THINKING_TOKENS, _MAX_TOKENS = 8192, 65536, 131072  # the makers' own: without, with, with "max"
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_:.-]{1,256}")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")
ALLOWED_TOOLS = "of type 'allowed_tools' is not available; send only the tools that may be called"
CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call: `parameters` is a JSON schema of an object."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """The prompt of a request, what its answer may hold, and whether it begins with reasoning (`thinking`) and how much
    of it. `must_call`: behind reasoning a call must follow, in a block that is not open."""

    prompt: Prompt
    expected: Expected
    thinking: bool
    effort: str | None
    must_call: bool = False

    @property
    def default_tokens(self) -> int:
        """Length of an answer whose request gives none; the engine cuts it to what the context leaves."""
        if not self.thinking:
            return _DEFAULT_TOKENS
        return _MAX_TOKENS if self.effort == "max" else _THINKING_TOKENS

    @property
    def stop_after(self) -> str | None:
        """The text behind which stop strings count."""
        return THINK_END if self.expected.reasoning else None


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """What endpoints share: a body that is read by `fields`, for a model that is served. Errors are OpenAI's
    where a protocol has none of its own."""

    served: Served
    path: str
    fields: Fields

    def begin(self, body: Mapping[str, Any]) -> tuple[FieldReader, Mapping[str, Any]]:
        """What reads a request, and what it gives."""
        reader = FieldReader(strict=self.served.strict_fields)
        return reader, reader.read(body, self.fields)

    def error(self, status: int, message: str, **more: str | None) -> Mapping[str, Any]:
        return openai_error(status, message, **more)


def call_of(
    parsed: ParsedRequest,
    named: tuple[str, str | None],
    reader: FieldReader,
    reply: Reply,
    params: Sequence[SamplingParams],
    *,
    stream: bool,
) -> Call:
    """The call that a conversation makes; `named` is the model and its adapter, as `choose_model` has them."""
    return Call(
        model=named[0],
        adapter=named[1],
        prompts=(parsed.prompt,) * len(params),
        params=params,
        stream=stream,
        reply=reply,
        images=len(parsed.prompt.plans),
        ignored=reader.ignored,
        tools=parsed.expected.tools,
    )


class Images:
    """Takes the images of one request: data URLs and bytes as they are, remote ones through `fetch`."""

    def __init__(self, served: Served, fetch: Fetch | None) -> None:
        self.stubs = ImageStubs(served.config, served.without_vision)
        self._fetch, self._limits, self._num_fetched = fetch, served.limits, 0

    def source(self, value: object, where: str) -> object:
        """An image's address, or its bytes if it is a remote one.

        Raises:
            RequestError: a remote image that is not or cannot be fetched.
        """
        if not isinstance(value, str) or not value[:8].lower().startswith(("http://", "https://")):
            return value
        if len(value) > self._limits.url_chars:
            refuse(where, f"has {len(value)} characters, an address may have {self._limits.url_chars}")
        if self._fetch is None:
            how = "send it as a data URL, or start the server with --remote-images"
            refuse(where, f"is a remote address; this server fetches no images, {how}")
        self._num_fetched += 1
        if self._num_fetched > self._limits.images:
            refuse(where, f"is image {self._num_fetched}, the limit is {self._limits.images}; send fewer")
        try:
            return self._fetch(value)
        except PromptError as error:
            raise RequestError(f"{where}: {error}", field=where) from error


def parse_tool(given: Mapping[str, Any], where: str, schema: str = "parameters") -> Tool:
    """A tool from the fields of any protocol; no schema, an empty one and one without properties take no parameters.

    Raises:
        RequestError: no name, or parameters that are no schema of an object.
    """
    name, parameters, place = given.get("name"), given.get(schema) or {}, f"{where}.{schema}"
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        refuse(f"{where}.name", f"is {str(name)[:100]!r}, expected letters, digits, _ and -, one at least")
    flag_field(given, "strict", where)  # without effect: a call that must be made fits its schema anyway
    description = text_field(given, "description", where) if "description" in given else None
    if not isinstance(parameters, Mapping):
        refuse(place, f"must be a JSON schema of an object, not {json_kind(parameters)}")
    kinds = parameters.get("type", "object")
    if isinstance(kinds, list) and "object" in kinds:  # or null, which no call has
        parameters = {**parameters, "type": (kinds := "object")}
    if "properties" in parameters and not parameters["properties"]:  # null, or PHP's empty list
        parameters = {**parameters, "properties": {}}
    if kinds != "object" or not isinstance(parameters.get("properties", {}), Mapping):
        refuse(place, f"of tool {name!r} must be a JSON schema with type object and properties by name")
    return Tool(name=name, description=description, parameters=parameters)


def unique_tools(tools: Iterable[tuple[Tool, str]]) -> tuple[Tool, ...]:
    """The tools, each with the place it stands at.

    Raises:
        RequestError: two have one name.
    """
    found: dict[str, Tool] = {}
    for tool, where in tools:
        if tool.name in found:
            refuse(where, f"has the name {tool.name!r} of a tool before it; names must differ")
        found[tool.name] = tool
    return tuple(found.values())


def leave_out_tool(kind: object, where: str, choice: object, reader: FieldReader) -> None:
    """Note that a tool which a server would have to run is not shown to the model.

    Raises:
        RequestError: it must be called, or the request wants no field ignored.
    """
    shown = str(kind)[:100]
    if reader.strict or (isinstance(choice, Mapping) and choice.get("type") == kind):
        refuse(where, f"is of type {shown!r}, which this server does not run; send functions that the client runs")
    reader.ignore(f"{where} ({shown})")


def parse_conversation(
    served: Served,
    protocol: Any,
    body: Mapping[str, Any],
    images: Images,
    *,
    tools: Sequence[Tool] = (),
    choice: str = "auto",
    named: str | None = None,
    shown_format: Structured | None = None,
    continues: bool = False,
    one_call: bool = False,
    field: str = "messages",
) -> ParsedRequest:
    """Render a request. `body` is what the library's class `protocol` reads of it: messages and thinking.

    `choice` is none, auto or required; `named` is the only tool that may be called. `shown_format` is the format of the
    answer that the protocol itself asks for. `continues`: the answer goes on where the last message stops. `field` of
    the request has the text.

    Raises:
        PromptError: the library refuses the body, or an image cannot be used.
        CapacityError: text that is certain to be too long.
    """
    if named is not None:
        tools, choice, one_call = [tool for tool in tools if tool.name == named], "required", True
        if not tools:
            refuse("tool_choice", f"asks for the tool {named[:100]!r}, no function named {named[:100]!r} is in tools")
    if choice == "required" and not tools:
        refuse("tool_choice", "asks for a call and the request has no tools; send tools or leave it out")
    if choice == "none":
        tools = ()
    require_short(served, _contents(body), field)  # before they are copied into a rendering
    request = convert_request(protocol, body)
    messages, thinking = request.conversation.messages, request.conversation.thinking_mode
    if continues:
        messages[-1] = deepseek_recipe.AssistantMessage(messages[-1].content, prefix=True)
    must_call = choice == "required" and thinking  # a prompt cannot open the block then, so the answer's grammar does
    try:
        conversation = deepseek_recipe.Conversation(
            messages,
            thinking_mode=thinking,
            tools=[deepseek_recipe.ToolDefinition(t.name, t.description, t.parameters) for t in tools],
            tool_choice="auto" if must_call else choice,  # type: ignore[arg-type]  # one of CHOICES
            reasoning_effort=request.conversation.reasoning_effort,
            **_format_options(shown_format),
        )
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise RequestError(f"a schema of the request cannot be shown to the model: {error}") from error
    rendered = render_conversation(conversation, images.stubs.images, served.config)
    require_short(served, [piece for piece in rendered.pieces if isinstance(piece, str)], field)
    prompt = prompt_from_chat(rendered, served.config, tokenizer_of(served), limits=served.limits, unpack=served.unpack)
    stage = request.parsing_options.thinking_initial_stage
    expected = Expected(
        tools={tool.name: tool.parameters for tool in tools},
        reasoning=stage is not None and stage.starts_in_reasoning(),
        in_calls=choice == "required" and not must_call,
        one_call=one_call,
        continues=continues or (bool(messages) and messages[-1].prefix),
    )
    return ParsedRequest(
        prompt=prompt,
        expected=expected,
        thinking=thinking,
        effort=request.conversation.reasoning_effort,
        must_call=must_call,
    )


def _format_options(shown: Structured | None) -> dict[str, Any]:
    """What the renderer tells the model about the format of its answer."""
    if shown is None:
        return {}
    if shown.kind == "json":
        return {"response_format": "json_object"}
    return {"response_schema" if shown.kind == "json_schema" else "response_regex": shown.value}


def structured_output(
    served: Served,
    parsed: ParsedRequest,
    given: Mapping[str, Any],
    own: Structured | None,
    reader: FieldReader,
    where: str = "",
) -> Structured | None:
    """What the answer must look like: what is asked for, the calls that must be made, or either where both may come.

    `own` is the format of text that the protocol itself asks for, at `where`; an answer that must be a call has none.

    Raises:
        PromptError: what is asked for cannot be had with the tools, or the tools make no grammar.
    """
    expected = parsed.expected
    must_call = expected.in_calls or parsed.must_call
    if own is not None and own.kind in _JSON and must_call:
        reader.ignore(where)
        own = None
    asked = asked_format(given, own, reader, thinking=parsed.thinking)
    if not expected.tools or (asked is None and not must_call):
        return asked
    answer, after = None, THINK_END if parsed.must_call else None
    if asked is not None:
        if asked.kind not in _JSON or must_call:
            raise PromptError('this format of answer cannot be had with these tools; say tool_choice "none" or drop it')
        answer, after = asked.value or {"type": "object"}, asked.after
    dsml = tokenizer_of(served).special_id(DSML)
    if dsml is None:
        raise PromptError(f"the tokenizer has no token {DSML}, so calls cannot be made to fit their tools")
    grammar = calls_grammar(
        served.config.family,
        expected.tools,
        dsml,
        one_call=expected.one_call,
        opened=expected.in_calls,
        answer=answer,
    )
    return Structured(kind="grammar", value=grammar, after=after)


def _contents(body: Mapping[str, Any]) -> list[str]:
    """Texts of messages that are rendered; past reasoning is not."""
    messages = body["messages"] if "messages" in body else body["input"]
    if isinstance(messages, str):
        return [messages]
    found = [message.get("content") for message in messages if message.get("type") != "reasoning"]
    parts = [part.get("text") for content in found if isinstance(content, list) for part in content]
    return [text for text in (*found, *parts) if isinstance(text, str)]


def require_short(served: Served, texts: Sequence[str], field: str) -> None:
    """Refuse texts that are certain to be too long, before that costs memory and time.

    Raises:
        TooLongError: even of the longest tokens of the vocabulary they make more than the context holds.
    """
    try:
        tokenizer_of(served).refuse_unless_fits(texts, served.max_length)
    except CapacityError as error:
        raise TooLongError(served.max_length + 1, served.max_length, field=field, at_least=True) from error


def require_memory(served: Served, prompt: Prompt, params: SamplingParams, field: str) -> None:
    """Raises TooLongError: the prompt leaves no room for a token of the answer."""
    if len(prompt) + (params.max_tokens != 0) > served.max_length:
        raise TooLongError(len(prompt), served.max_length, field=field)


def read_role(given: Mapping[str, Any], roles: Sequence[str], where: str) -> str:
    """Raises RequestError: a message has none of the roles."""
    return choice_field(given, "role", roles, where) or refuse(
        f"{where}.role", f"is missing; roles are {', '.join(roles)}"
    )


def choose_model(served: Served, given: Mapping[str, Any]) -> tuple[str, str | None]:
    """The name to answer with, and the adapter it chooses; without a name the model itself.

    Raises:
        NotServedError: nothing is served under that name.
    """
    name = given.get("model", served.names[0])
    if name in served.names:
        return str(name), None
    if name in served.adapters:
        return str(name), str(name)
    known = ", ".join((*served.names, *served.adapters))
    raise NotServedError(f"model {str(name)[:200]!r} is not served here; served are {known}")


def tokenizer_of(served: Served) -> PromptTokenizer:
    """The tokenizer, without which nothing is served.

    Raises:
        PromptError: the model folder has none.
    """
    if served.tokenizer is None:
        raise PromptError("this model folder has no tokenizer.json, so it takes no text; add the file")
    return served.tokenizer
