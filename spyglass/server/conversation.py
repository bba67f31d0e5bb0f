"""What the three chat protocols share: a request body becomes a prompt, and what its answer may hold is known.

Pictures are taken out before the library reads a body (`ImageStubs`) and come back where it puts their stubs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe

from spyglass.engine.request import SamplingParams, Structured
from spyglass.errors import NotServedError, PromptError
from spyglass.prompt.build import prompt_from_chat
from spyglass.prompt.chat import ImageStubs, convert_request, render_conversation
from spyglass.prompt.tokenizer import PromptTokenizer
from spyglass.prompt.tokens import Prompt
from spyglass.server.exchange import Call, Fetch, Reply, Served
from spyglass.server.fields import flag_field
from spyglass.server.markup import THINK_END, Expected
from spyglass.server.tags import DSML
from spyglass.server.tool_grammar import calls_grammar

_JSON = ("json", "json_schema")
_DEFAULT_TOKENS, _THINKING_TOKENS, _MOST_TOKENS = 8192, 65536, 131072  # the makers' own: without, with, with "max"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversed:
    """A converted request: the library's own form, the prompt it makes, where its answer begins (None = outside
    thinking) and what it may hold. `must_call`: behind reasoning a call must follow, in a block that is not open."""

    request: deepseek_recipe.ConversationRequest
    prompt: Prompt
    stage: deepseek_recipe.ThinkingInitialStage | None
    expected: Expected
    thinking: bool
    must_call: bool = False

    @property
    def default_tokens(self) -> int:
        """Length of an answer whose request states none; the engine cuts it to what the context leaves."""
        if not self.thinking:
            return _DEFAULT_TOKENS
        return _MOST_TOKENS if self.request.conversation.reasoning_effort == "max" else _THINKING_TOKENS

    @property
    def stop_after(self) -> str | None:
        """The text behind which stop strings count."""
        return THINK_END if self.expected.reasoning else None

    def call(
        self,
        stated: Mapping[str, Any],
        chosen: tuple[str, str | None],
        params: Sequence[SamplingParams],
        reply: Reply,
        ignored: tuple[str, ...],
    ) -> Call:
        """The call of a request; `chosen` is what `choose_model` found."""
        model, adapter = chosen
        return Call(
            model=model,
            prompts=[self.prompt] * len(params),
            params=params,
            stream=flag_field(stated, "stream"),
            reply=reply,
            adapter=adapter,
            pictures=len(self.prompt.plans),
            user_fields=ignored,
        )


class Pictures:
    """Takes the pictures of one request: data URLs and bytes as they are, remote ones through `fetch`."""

    def __init__(self, served: Served, fetch: Fetch | None) -> None:
        self.stubs = ImageStubs(served.config, served.without_vision)
        self._fetch, self._limits, self._fetched = fetch, served.limits, 0

    def source(self, value: object, where: str) -> object:
        """A picture's address, or its bytes if it is a remote one.

        Raises:
            PromptError: a remote picture that is not or cannot be fetched.
        """
        if not isinstance(value, str) or not value[:8].lower().startswith(("http://", "https://")):
            return value
        if len(value) > self._limits.url_chars:
            raise PromptError(f"{where} has {len(value)} characters, an address may have {self._limits.url_chars}")
        if self._fetch is None:
            raise PromptError(f"{where} is a remote address; this server fetches no pictures, send it as a data URL")
        self._fetched += 1
        if self._fetched > self._limits.images:
            raise PromptError(f"{where} is picture {self._fetched}, the limit is {self._limits.images}; send fewer")
        try:
            return self._fetch(value)
        except PromptError as error:
            raise PromptError(f"{where}: {error}") from error


def converse(
    served: Served,
    protocol: Any,
    body: Mapping[str, Any],
    pictures: Pictures,
    *,
    changed: Mapping[str, Any] | None = None,
    continues: bool = False,
    one_call: bool = False,
) -> Conversed:
    """Convert and render a request. `changed` are parts of the conversation that the library leaves out, `continues`
    says that the answer goes on where the last message of the assistant stops.

    Raises:
        PromptError: the library refuses the body, or a picture cannot be used.
        CapacityError: text that is certain to be too long.
    """
    called = _thinks_and_must_call(protocol, body, changed or {})
    if called is not None:
        body, changed = called
    request = convert_request(protocol, body)
    stage = request.parsing_options.thinking_initial_stage
    if changed or continues:
        request = _with(request, changed or {}, continues)
    conversation = request.conversation
    if {**body, **(changed or {})}.get("tool_choice") == "required" and not conversation.tools:
        raise PromptError("tool_choice asks for a call and the request has no tools; send tools or leave it out")
    rendered = render_conversation(conversation, pictures.stubs.pictures, served.config)
    tokenizer = tokenizer_of(served)
    tokenizer.refuse_unless_fits([piece for piece in rendered.pieces if isinstance(piece, str)], served.max_length)
    prompt = prompt_from_chat(rendered, served.config, tokenizer, limits=served.limits)
    expected = Expected(
        tools={tool.name: tool.parameters for tool in conversation.tools},
        reasoning=stage is not None and stage.starts_in_reasoning(),
        in_calls=conversation.tool_choice == "required",
        one_call=one_call,
    )
    return Conversed(
        request=request,
        prompt=prompt,
        stage=stage,
        expected=expected,
        thinking=conversation.thinking_mode,
        must_call=called is not None,
    )


def _thinks_and_must_call(
    protocol: Any, body: Mapping[str, Any], changed: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Body and changes without their forced call, if they ask for thinking too: a prompt cannot open the block of
    calls then, so the answer's grammar does. A tool that is forced by name is the only one shown, as without thinking.
    """
    choice = changed.get("tool_choice", body.get("tool_choice"))
    named = _name(choice)
    tools = [tool for tool in body.get("tools", ()) if named in (None, _name(tool))]
    if not tools or (choice != "required" and named is None):
        return None
    free = {name: value for name, value in body.items() if name != "tool_choice"} | {"tools": tools}
    if not convert_request(protocol, free).conversation.thinking_mode:
        return None
    return free, {name: value for name, value in changed.items() if name != "tool_choice"}


def _name(value: object) -> object:
    """What a tool, or the choice of one, is called in any of the protocols."""
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    return inner.get("name") if isinstance(inner, Mapping) else None


def _with(
    request: deepseek_recipe.ConversationRequest, changed: Mapping[str, Any], continues: bool
) -> deepseek_recipe.ConversationRequest:
    old = request.conversation
    messages = old.messages
    if continues:
        messages[-1] = deepseek_recipe.AssistantMessage(messages[-1].content, prefix=True)
    same = {
        "messages": messages,
        "thinking_mode": old.thinking_mode,
        "tools": old.tools,
        "tool_choice": old.tool_choice,
        "reasoning_effort": old.reasoning_effort,
    }
    try:
        conversation = deepseek_recipe.Conversation(**{**same, **changed})
    except (ValueError, TypeError, OverflowError) as error:
        raise PromptError(f"the request cannot be rendered: {error}") from error
    return deepseek_recipe.ConversationRequest(conversation, request.model_version)


def form_of(served: Served, conversed: Conversed, stated: Structured | None) -> Structured | None:
    """The form of the answer: the one stated, that of the calls that must be made, or either where both may come.

    Raises:
        PromptError: the request wants a form that cannot be had beside its tools, or its tools cannot be made a form.
    """
    expected = conversed.expected
    must_call = expected.in_calls or conversed.must_call
    if not expected.tools or (stated is None and not must_call):
        return stated
    answer, after = None, THINK_END if conversed.must_call else None
    if stated is not None:
        if stated.kind not in _JSON or must_call:
            raise PromptError('this form of answer cannot be had beside these tools; say tool_choice "none" or drop it')
        answer, after = stated.value or {"type": "object"}, stated.after
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


def choose_model(served: Served, body: Mapping[str, Any]) -> tuple[str, str | None]:
    """The name to answer with, and the adapter it chooses; without a name the model itself.

    Raises:
        NotServedError: nothing is served under that name.
    """
    name = body.get("model", served.names[0])
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
