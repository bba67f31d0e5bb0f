"""Token counts without an answer: Anthropic's and OpenAI's own paths, and `/tokenize`, `/detokenize` as other engines
have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from spyglass.server.exchange import Fetch, Immediate
from spyglass.server.protocols.chat import CHAT_FIELDS, parse_chat
from spyglass.server.protocols.completions import prompt_of
from spyglass.server.protocols.conversation import ModelEndpoint, choose_model, tokenizer_of
from spyglass.server.protocols.fields import Fields, flag_field, list_of, refuse
from spyglass.server.protocols.messages import MESSAGES_FIELDS, AnthropicEndpoint, parse_messages
from spyglass.server.protocols.responses import RESPONSES_FIELDS, parse_responses

_TEXT = Fields(read=frozenset({"model", "prompt", "add_special_tokens", "return_token_strs"}))
_CHAT = replace(CHAT_FIELDS, read=CHAT_FIELDS.read | {"return_token_strs"})
_EITHER = replace(_CHAT, read=_CHAT.read | _TEXT.read)
_IDS = Fields(read=frozenset({"model", "tokens"}))


@dataclass(frozen=True, slots=True)
class CountMessages(AnthropicEndpoint):
    """`POST /v1/messages/count_tokens`: the body of a message, without `max_tokens`."""

    path: str = "/v1/messages/count_tokens"
    fields: Fields = MESSAGES_FIELDS

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Immediate:
        reader, given = self.begin(body)
        choose_model(self.served, given)
        prompt = parse_messages(self.served, given, reader, fetch)[0].prompt
        return Immediate(body={"input_tokens": len(prompt)}, ignored=reader.ignored)


@dataclass(frozen=True, slots=True)
class CountResponses(ModelEndpoint):
    """`POST /v1/responses/input_tokens`: the body of a response."""

    path: str = "/v1/responses/input_tokens"
    fields: Fields = RESPONSES_FIELDS

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Immediate:
        reader, given = self.begin(body)
        choose_model(self.served, given)
        prompt = parse_responses(self.served, given, reader, fetch)[0].prompt
        body = {"object": "response.input_tokens", "input_tokens": len(prompt)}
        return Immediate(body=body, ignored=reader.ignored)


@dataclass(frozen=True, slots=True)
class Tokenize(ModelEndpoint):
    """`POST /tokenize`: `prompt`, or `messages` with everything a chat may have. Image positions have the id -1."""

    path: str = "/tokenize"
    fields: Fields = _EITHER

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Immediate:
        is_chat = "messages" in body
        reader, given = replace(self, fields=_CHAT if is_chat else _TEXT).begin(body)
        choose_model(self.served, given)
        if is_chat:
            prompt = parse_chat(self.served, given, reader, fetch)[0].prompt
        else:
            prompt = prompt_of(
                self.served, given.get("prompt"), start=flag_field(given, "add_special_tokens", default=True)
            )
        ids = prompt.ids_T.tolist()
        answer = {"count": len(ids), "max_model_len": self.served.max_length, "tokens": ids}
        if flag_field(given, "return_token_strs"):
            tokenizer = tokenizer_of(self.served)
            answer["token_strs"] = [tokenizer.spelling(token) or "" if token >= 0 else "" for token in ids]
        return Immediate(body=answer, ignored=reader.ignored)


@dataclass(frozen=True, slots=True)
class Detokenize(ModelEndpoint):
    """`POST /detokenize`: the text of `tokens`."""

    path: str = "/detokenize"
    fields: Fields = _IDS

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Immediate:
        reader, given = self.begin(body)
        choose_model(self.served, given)
        ids = list_of(given.get("tokens"), "tokens")
        size = self.served.config.text.vocab_size
        for place, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                refuse(f"tokens[{place}]", f"is {str(token)[:40]}, expected a token id from 0 to {size - 1}")
        return Immediate(body={"prompt": tokenizer_of(self.served).decode(ids)}, ignored=reader.ignored)
