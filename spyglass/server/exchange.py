"""The seam between transport and protocols: a body becomes a `Call`, deltas become what that protocol's client reads.

Transport (`app`) knows connections, limits and time; a protocol knows schemas. Neither sees the other's insides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from spyglass.config.model import ModelConfig
from spyglass.engine.request import Delta, SamplingParams
from spyglass.prompt.build import Unpack
from spyglass.prompt.decode import ImageLimits
from spyglass.prompt.tokenizer import PromptTokenizer
from spyglass.prompt.tokens import Prompt
from spyglass.server.protocols.fields import Fields

if TYPE_CHECKING:
    from spyglass.engine.sequence import Request

# Bytes of a remote image by its address; raises PromptError. Made for one request, whose time and bytes it counts.
Fetch = Callable[[str], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What protocols must know of the model that is served.

    `names` are what clients may call it, the first one is ours; `adapters` are names that choose an adapter now, by
    `adapter_names`, which any thread may ask.
    `max_length` bounds prompt and answer together, `limits` the images of one request. `without_vision`: what a
    image does to a model that takes none, as in `ChatOptions`. `strict_fields`: refuse unknown fields. `unpack` does
    the work of `unpack_image` in other processes. `vision`: whether images are taken, "off" by choice.
    """

    names: tuple[str, ...]
    config: ModelConfig
    tokenizer: PromptTokenizer | None
    limits: ImageLimits
    max_length: int
    adapter_names: Callable[[], tuple[str, ...]] = tuple
    without_vision: Literal["refuse", "note"] = "refuse"
    strict_fields: bool = False
    unpack: Unpack | None = None
    vision: Literal["yes", "no", "off"] = "no"

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that are served now."""
        return self.adapter_names()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamForm:
    """What a stream is made of: its media type, what says in a silence that it lives, and an error in its midst."""

    media_type: str
    alive: bytes
    error: Callable[[Mapping[str, Any]], bytes]


def _event_of_an_error(body: Mapping[str, Any]) -> bytes:
    return b"event: error\ndata: " + json.dumps(body, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


EVENTS = StreamForm(media_type="text/event-stream; charset=utf-8", alive=b": alive\n\n", error=_event_of_an_error)


class Reply(Protocol):
    """Turns the deltas of one call into bytes of its protocol. Made by `parse`, used by one request, not shared.

    `index` numbers the answers of a call (`n` of the OpenAI request). What several steps brought may come as one delta
    (a slow reader). Every answer ends with a delta that carries `output`; an output with `error` becomes the protocol's
    own error, in the stream or as the whole body.
    """

    def begin(self, request_id: str) -> bytes:
        """Events before the first token; may be empty."""

    def push(self, index: int, delta: Delta) -> bytes:
        """Events of one delta; may be empty while a tag is incomplete."""

    def end(self) -> bytes:
        """Events after the last answer has ended (usage, the closing event)."""

    @property
    def malformed_tool_call(self) -> bool:
        """Whether an answer held markup of calls that is no call and was left as text; for the log."""

    def whole(self, request_id: str) -> tuple[int, Mapping[str, Any]]:
        """Status and JSON body of a call that does not stream, after every delta has been pushed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One parsed request. `params` and `prompts` one per answer, in order; `adapter` None = the base model.

    `requests` is what the engine takes for each answer, once they are checked. `images` counts images of the request
    (usage and metrics); `ignored` are places of the request without effect, named in the log and in a header, never
    their contents. `tools` are the schemas of the tools by name, `form` is that of the stream.
    """

    model: str
    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]
    stream: bool
    reply: Reply
    adapter: str | None = None
    requests: Sequence[Request] = ()
    images: int = 0
    ignored: tuple[str, ...] = ()
    tools: Mapping[str, Any] = field(default_factory=dict)
    form: StreamForm = EVENTS

    @property
    def prompt(self) -> Prompt:
        """The prompt of the first answer; in the chat protocols that of all."""
        return self.prompts[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Immediate:
    """An answer that needs no model: token counts. `content` is the body as it is sent, once it is written."""

    body: Mapping[str, Any]
    content: bytes = b""
    status: int = 200
    ignored: tuple[str, ...] = ()


class Endpoint(Protocol):
    """One protocol: where it listens (POST), how a body is read, how an error looks."""

    @property
    def path(self) -> str:
        """The path, from the root."""

    @property
    def fields(self) -> Fields:
        """The fields of a body, by which it is read and described."""

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Call | Immediate:
        """Read a request; runs off the event loop, since it decodes images. Without `fetch`, remote ones are refused.

        Raises:
            PromptError, CapacityError, AdapterError: the request cannot be honoured; the message names the field.
            NotServedError: it names a model that is not served here.
        """

    def error(self, status: int, message: str, **more: str | None) -> Mapping[str, Any]:
        """The protocol's error body; `more` are `field`, the place of the request at fault, and `code`."""
