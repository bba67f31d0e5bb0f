"""Token counts without an answer: Anthropic's and OpenAI's own paths, and `/tokenize`, `/detokenize` as other engines
have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spyglass.errors import PromptError
from spyglass.server.chat import CHAT_FIELDS, converse_chat
from spyglass.server.completions import prompt_of
from spyglass.server.conversation import choose_model, tokenizer_of
from spyglass.server.exchange import Fetch, Immediate, Served
from spyglass.server.fields import Fields, flag_field, listed, read_fields
from spyglass.server.messages import MESSAGES_FIELDS, anthropic_error, converse_messages
from spyglass.server.openai_errors import openai_error
from spyglass.server.responses import RESPONSES_FIELDS, converse_responses

_TEXT = Fields(read=frozenset({"model", "prompt", "add_special_tokens", "return_token_strs"}))
_CHAT = Fields(read=CHAT_FIELDS.read | {"return_token_strs"}, ignored=CHAT_FIELDS.ignored, fixed=CHAT_FIELDS.fixed)
_IDS = Fields(read=frozenset({"model", "tokens"}))


@dataclass(frozen=True, slots=True)
class CountMessages:
    """`POST /v1/messages/count_tokens`: the body of a message, without `max_tokens`."""

    served: Served
    path: str = "/v1/messages/count_tokens"

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Immediate:
        """Read a request.

        Raises:
            PromptError, NotServedError: as `Endpoint.parse`.
        """
        stated, _ = read_fields(body, MESSAGES_FIELDS)
        choose_model(self.served, stated)
        return Immediate(body={"input_tokens": len(converse_messages(self.served, stated, fetch)[0].prompt)})

    def error(self, status: int, message: str, *, field: str | None = None) -> Mapping[str, Any]:
        """Anthropic's error body."""
        return anthropic_error(status, message)


@dataclass(frozen=True, slots=True)
class CountResponses:
    """`POST /v1/responses/input_tokens`: the body of a response."""

    served: Served
    path: str = "/v1/responses/input_tokens"

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Immediate:
        """Read a request.

        Raises:
            PromptError, NotServedError: as `Endpoint.parse`.
        """
        stated, _ = read_fields(body, RESPONSES_FIELDS)
        choose_model(self.served, stated)
        prompt = converse_responses(self.served, stated, fetch)[1].prompt
        return Immediate(body={"object": "response.input_tokens", "input_tokens": len(prompt)})

    def error(self, status: int, message: str, *, field: str | None = None) -> Mapping[str, Any]:
        """OpenAI's error body."""
        return openai_error(status, message, field)


@dataclass(frozen=True, slots=True)
class Tokenize:
    """`POST /tokenize`: `prompt`, or `messages` with everything a chat may have. Picture positions have the id -1."""

    served: Served
    path: str = "/tokenize"

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Immediate:
        """Read a request.

        Raises:
            PromptError, NotServedError: as `Endpoint.parse`.
        """
        is_chat = "messages" in body
        stated, _ = read_fields(body, _CHAT if is_chat else _TEXT)
        choose_model(self.served, stated)
        if is_chat:
            prompt = converse_chat(self.served, stated, fetch)[0].prompt
        else:
            prompt = prompt_of(
                self.served, stated.get("prompt"), start=flag_field(stated, "add_special_tokens", default=True)
            )
        ids = prompt.ids_T.tolist()
        answer = {"count": len(ids), "max_model_len": self.served.max_length, "tokens": ids}
        if flag_field(stated, "return_token_strs"):
            tokenizer = tokenizer_of(self.served)
            answer["token_strs"] = [tokenizer.spelling(token) or "" if token >= 0 else "" for token in ids]
        return Immediate(body=answer)

    def error(self, status: int, message: str, *, field: str | None = None) -> Mapping[str, Any]:
        """OpenAI's error body."""
        return openai_error(status, message, field)


@dataclass(frozen=True, slots=True)
class Detokenize:
    """`POST /detokenize`: the text of `tokens`."""

    served: Served
    path: str = "/detokenize"

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Immediate:
        """Read a request.

        Raises:
            PromptError, NotServedError: as `Endpoint.parse`.
        """
        stated, _ = read_fields(body, _IDS)
        choose_model(self.served, stated)
        ids = listed(stated.get("tokens"), "tokens")
        size = self.served.config.text.vocab_size
        for place, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise PromptError(f"tokens[{place}] is {str(token)[:40]}, expected a token id from 0 to {size - 1}")
        return Immediate(body={"prompt": tokenizer_of(self.served).decode(ids)})

    def error(self, status: int, message: str, *, field: str | None = None) -> Mapping[str, Any]:
        """OpenAI's error body."""
        return openai_error(status, message, field)
