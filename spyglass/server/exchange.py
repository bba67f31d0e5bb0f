"""The seam between transport and protocols: a body becomes a `Call`, deltas become what that protocol's client reads.

Transport (`app`) knows connections, limits and time; a protocol knows schemas. Neither sees the other's insides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spyglass.engine.request import Delta, SamplingParams
from spyglass.prompt.tokens import Prompt


class Reply(Protocol):
    """Turns the deltas of one call into bytes of its protocol. Made by `parse`, used by one request, not shared.

    `index` numbers the answers of a call (`n` of the OpenAI request). Every answer ends with a delta that carries
    `output`; an output with `error` becomes the protocol's own error, in the stream or as the whole body.
    """

    def begin(self, request_id: str) -> bytes:
        """Server-sent events before the first token; may be empty."""

    def push(self, index: int, delta: Delta) -> bytes:
        """Server-sent events of one delta; may be empty while a tag is incomplete."""

    def end(self) -> bytes:
        """Server-sent events after the last answer has ended (usage, the closing event)."""

    def whole(self, request_id: str) -> tuple[int, Mapping[str, Any]]:
        """Status and JSON body of a call that does not stream, after every delta has been pushed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One parsed request. `params` one per answer, all for the same `prompt`; `adapter` None = the base model.

    `pictures` counts pictures of the request (usage and metrics); `user_fields` are request fields of no effect here
    that are safe to ignore, named once in the log, never their contents.
    """

    model: str
    prompt: Prompt
    params: Sequence[SamplingParams]
    stream: bool
    reply: Reply
    adapter: str | None = None
    pictures: int = 0
    user_fields: tuple[str, ...] = ()


class Endpoint(Protocol):
    """One protocol: where it listens, how a body is read, how an error looks."""

    path: str

    def parse(self, body: Mapping[str, Any]) -> Call:
        """Read a request; runs off the event loop, since it decodes pictures.

        Raises:
            PromptError, CapacityError, AdapterError: the request cannot be honoured; the message names the field.
        """

    def error(self, status: int, message: str, *, field: str | None = None) -> Mapping[str, Any]:
        """The protocol's error body."""
