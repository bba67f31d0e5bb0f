"""OpenAI Completions: `POST /v1/completions`, prompts of text or token ids that the model continues. No pictures.

Answers are numbered prompt by prompt: answer j of n to prompt i is i · n + j, and has the seed it would have alone.
"""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spyglass.engine.request import Delta, RequestOutput, SamplingParams, TokenLogprob
from spyglass.errors import CapacityError, PromptError
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.placeholder import resolve_placeholder
from spyglass.prompt.tokens import Prompt
from spyglass.server.answer import Tokens, event, failure, spell
from spyglass.server.conversation import choose_model, tokenizer_of
from spyglass.server.exchange import Call, Fetch, Served
from spyglass.server.fields import Fields, flag_field, read_fields
from spyglass.server.openai_errors import openai_error
from spyglass.server.sampling import EXTRA, FORMS, MOST_ANSWERS, NATIVE, STREAM_OPTIONS, answers, sampling, stated_form

_FIELDS = Fields(
    read=NATIVE
    | EXTRA
    | FORMS
    | {"model", "prompt", "stream", "stream_options", "max_tokens", "n", "stop", "logprobs", "echo", "logit_bias"}
    | {"add_special_tokens"},
    ignored=frozenset({"user"}),
    fixed={"best_of": (1,), "suffix": ("",)},
)
_MAX_TOKENS = 16  # the protocol's own default


@dataclass(frozen=True, slots=True)
class CompletionsEndpoint:
    """Completions of one model."""

    served: Served
    path: str = "/v1/completions"

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Call:
        """Read a request.

        Raises:
            PromptError, NotServedError: as `Endpoint.parse`.
        """
        stated, ignored = read_fields(body, _FIELDS)
        model, adapter = choose_model(self.served, stated)
        stream_options, more = read_fields(stated.get("stream_options", {}), STREAM_OPTIONS, "stream_options")
        start, stream = flag_field(stated, "add_special_tokens", default=True), flag_field(stated, "stream")
        prompts = prompts_of(self.served, stated.get("prompt"), start=start)
        echo, logprobs = flag_field(stated, "echo"), stated.get("logprobs")
        if echo and logprobs is not None and stream:
            raise PromptError(
                "logprobs of an echoed prompt are known only in the end; leave out stream, echo or logprobs"
            )
        params = sampling(
            stated,
            max_tokens=stated.get("max_tokens", _MAX_TOKENS),
            stop=stated.get("stop"),
            logprobs=logprobs,
            prompt_logprobs=logprobs if echo else None,
            structured=stated_form(stated, None, thinking=False),
        )
        many = answers(params, stated.get("n"))
        if len(prompts) * len(many) > MOST_ANSWERS:
            raise PromptError(
                f"{len(prompts)} prompts with n {len(many)} are more than {MOST_ANSWERS} answers; ask for fewer"
            )
        each = [prompt for prompt in prompts for _ in many]
        reply = CompletionsReply(
            self.served, each, params, model=model, echo=echo, include_usage=flag_field(stream_options, "include_usage")
        )
        return Call(
            model=model,
            prompts=each,
            params=many * len(prompts),
            stream=stream,
            reply=reply,
            adapter=adapter,
            user_fields=ignored + more,
        )

    def error(self, status: int, message: str, *, field: str | None = None) -> Mapping[str, Any]:
        """OpenAI's error body."""
        return openai_error(status, message, field)


def prompts_of(served: Served, prompt: object, *, start: bool = True) -> list[Prompt]:
    """The prompts of a text or list of token ids, or of a list of them.

    Raises:
        PromptError, CapacityError: as `prompt_of`; of several, the message says which.
    """
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], str | list):
        return [prompt_of(served, prompt, start=start)]
    if len(prompt) > MOST_ANSWERS:
        raise PromptError(
            f"prompt holds {len(prompt)} prompts, a request may have {MOST_ANSWERS}; send several requests"
        )
    return [prompt_of(served, one, start=start, where=f"prompt[{place}]") for place, one in enumerate(prompt)]


def prompt_of(served: Served, prompt: object, *, start: bool = True, where: str = "prompt") -> Prompt:
    """The prompt of one text, after a BOS if `start`, or of one list of token ids, taken as it is.

    Raises:
        PromptError: neither of them, or ids that stand for pictures.
        CapacityError: it is certain to be too long.
    """
    if isinstance(prompt, str):
        first = [served.config.bos_token_id] if start and served.config.bos_token_id is not None else []
        tokenizer = tokenizer_of(served)
        try:
            tokenizer.refuse_unless_fits([prompt], served.max_length)
        except CapacityError as error:
            raise CapacityError(f"{where}: {error}") from error
        prompt = [*first, *tokenizer.encode_text(prompt)]
    if not isinstance(prompt, list | tuple):
        raise PromptError(f"{where} must be a text or a list of token ids, not {type(prompt).__name__}")
    placeholder = resolve_placeholder(served.config, served.tokenizer)
    try:
        return prompt_from_parts([prompt], served.config, placeholder=placeholder)
    except PromptError as error:
        raise PromptError(f"{where}: {error}") from error


class CompletionsReply:
    """Chunks of Completions, or its whole body."""

    def __init__(
        self,
        served: Served,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        model: str,
        echo: bool,
        include_usage: bool,
    ) -> None:
        self._id, self._created, self._model = f"cmpl-{uuid.uuid4().hex}", int(time.time()), model
        self._prompts, self._include_usage = prompts, include_usage
        self._tokens = Tokens(tokenizer_of(served), reasoning=False, with_logprobs=params.logprobs is not None)
        self._echoes = [self._shown(prompt) if echo else "" for prompt in prompts]
        self._decoders = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in prompts]
        self._offsets = [0] * len(prompts)
        self._waiting: list[list[TokenLogprob | None]] = [[] for _ in prompts]
        self._outputs: dict[int, RequestOutput] = {}
        self._streams = False

    @property
    def odd(self) -> bool:
        """Nothing here is parsed."""
        return False

    def begin(self, request_id: str) -> bytes:
        """The prompts, if they are to be repeated."""
        self._streams = True
        return b"".join(self._chunk([self._choice(i, echo, None)]) for i, echo in enumerate(self._echoes) if echo)

    def push(self, index: int, delta: Delta) -> bytes:
        """The chunk of one delta."""
        output = delta.output
        if output is not None:
            self._outputs[index] = output
        if not self._streams:
            return b""
        if output is not None and (wrong := failure(output)) is not None:
            return event(None, spell(openai_error(*wrong)))
        self._waiting[index] += delta.logprobs or ()
        if not delta.text and output is None:
            return b""
        return self._chunk([self._choice(index, delta.text, output)])

    def end(self) -> bytes:
        """Usage, if it was asked for, and the end of the stream."""
        usage = self._chunk([], usage=self._usage()) if self._include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def whole(self, request_id: str) -> tuple[int, Mapping[str, Any]]:
        """All answers in one body."""
        choices = []
        for index, output in sorted(self._outputs.items()):
            wrong = failure(output)
            if wrong is not None:
                return wrong[0], openai_error(*wrong)
            self._waiting[index] = [*(output.prompt_logprobs or ()), *(output.logprobs or ())]
            choices.append(self._choice(index, self._echoes[index] + output.text, output))
        return 200, {**self._head(), "choices": choices, "usage": self._usage()}

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event(None, spell({**self._head(), "choices": choices, **more}))

    def _usage(self) -> dict[str, Any]:
        answers: dict[int, list[RequestOutput]] = {}
        for index, output in self._outputs.items():
            answers.setdefault(id(self._prompts[index]), []).append(output)
        prompts = {id(prompt): prompt for prompt in self._prompts}
        first, *more = (self._tokens.count(prompt, answers.get(key, ())) for key, prompt in prompts.items())
        return sum(more, start=first).chat()

    def _shown(self, prompt: Prompt) -> str:
        return self._tokens.visible(prompt.ids_T.tolist()).decode(errors="replace")

    def _choice(self, index: int, text: str, output: RequestOutput | None) -> dict[str, Any]:
        reason = None if output is None else output.finish_reason
        return {"index": index, "text": text, "logprobs": self._logprobs(index, output), "finish_reason": reason}

    def _logprobs(self, index: int, output: RequestOutput | None) -> dict[str, Any] | None:
        """What has waited, in the protocol's four lists. A prompt's first token has no log-probability."""
        entries, self._waiting[index] = self._waiting[index], []
        if not self._tokens.with_logprobs or (not entries and output is None):
            return None
        first = int(self._prompts[index].ids_T[0])
        ids = [first if entry is None else entry.token_id for entry in entries]
        offsets = []
        for token in ids:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(self._decoders[index].decode(self._tokens.visible([token])))
        told = [None if entry is None else self._tokens.logprob(entry) for entry in entries]
        return {
            "tokens": list(map(self._tokens.text, ids)),
            "token_logprobs": [one and one["logprob"] for one in told],
            "top_logprobs": [one and {top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in told],
            "text_offset": offsets,
        }
