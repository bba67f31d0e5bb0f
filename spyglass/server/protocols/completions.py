"""OpenAI Completions: `POST /v1/completions`, prompts of text or token ids that the model continues. No images.

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
from spyglass.errors import PromptError, json_kind
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.placeholder import resolve_placeholder
from spyglass.prompt.tokens import Prompt
from spyglass.server.errors import TooLongError, openai_error
from spyglass.server.exchange import Call, Fetch, Served
from spyglass.server.limits import MAX_ANSWERS, MAX_LOGPROBS
from spyglass.server.protocols.conversation import (
    ModelEndpoint,
    choose_model,
    require_memory,
    require_short,
    tokenizer_of,
)
from spyglass.server.protocols.events import Tokens, failure, sse
from spyglass.server.protocols.fields import Fields, RequestError, flag_field, refuse, text_field
from spyglass.server.protocols.sampling import (
    STREAM_OPTIONS,
    answers,
    asked_format,
    sampled_fields,
    sampling,
    token_limit,
)

_FIELDS = sampled_fields(
    read={"model", "prompt", "suffix", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "stop"}
    | {"logprobs", "echo", "logit_bias", "add_special_tokens"},
    ignored={"metadata", "store", "service_tier", "return_progress"},
    neutral={},
    inner={"stream_options": STREAM_OPTIONS},
)  # fmt: skip
_MAX_TOKENS = 16  # the protocol's own default


@dataclass(frozen=True, slots=True)
class CompletionsEndpoint(ModelEndpoint):
    """Completions of one model."""

    path: str = "/v1/completions"
    fields: Fields = _FIELDS

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Call:
        reader, given = self.begin(body)
        model, adapter = choose_model(self.served, given)
        stream_options = reader.read(given.get("stream_options", {}), STREAM_OPTIONS, "stream_options")
        start, stream = flag_field(given, "add_special_tokens", default=True), flag_field(given, "stream")
        prompts = prompts_of(self.served, given.get("prompt"), start=start, suffix=given.get("suffix"))
        echo, logprobs = flag_field(given, "echo"), given.get("logprobs")
        if echo and logprobs is not None and stream:
            refuse("logprobs", "of an echoed prompt are known only in the end; leave out stream, echo or logprobs")
        params = sampling(
            given,
            max_tokens=token_limit(
                given, ("max_tokens", "max_completion_tokens"), _MAX_TOKENS, logprobs=logprobs, prompts=len(prompts)
            ),
            stop=given.get("stop"),
            logprobs=logprobs,
            prompt_logprobs=logprobs if echo else None,
            structured=asked_format(given, None, reader, thinking=False),
        )
        for prompt in prompts:
            require_memory(self.served, prompt, params, "prompt")
        many = answers(params, given.get("n"))
        if echo and logprobs is not None and sum(map(len, prompts)) * len(many) * (1 + logprobs) > MAX_LOGPROBS:
            refuse("logprobs", f"of the echoed prompts are more than {MAX_LOGPROBS:,} numbers; ask for fewer")
        if len(prompts) * len(many) > MAX_ANSWERS:
            refuse("n", f"{len(many)} with {len(prompts)} prompts are more than {MAX_ANSWERS} answers; ask for fewer")
        each = [prompt for prompt in prompts for _ in many]
        reply = CompletionsReply(
            self.served,
            each,
            params,
            model=model,
            echo=echo,
            include_usage=flag_field(stream_options, "include_usage", "stream_options"),
            usage_in_each=flag_field(stream_options, "continuous_usage_stats", "stream_options"),
        )
        return Call(
            model=model,
            adapter=adapter,
            prompts=each,
            params=many * len(prompts),
            stream=stream,
            reply=reply,
            ignored=reader.ignored,
        )


def prompts_of(served: Served, prompt: object, *, start: bool = True, suffix: object = None) -> list[Prompt]:
    """The prompts of a text or list of token ids, or of a list of them. With `suffix` the answer is what stands between
    the text and it.

    Raises:
        PromptError, CapacityError: as `prompt_of`; of several, the message says which.
    """
    if suffix not in (None, ""):
        return [_fill_in_the_middle(served, prompt, suffix)]
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], str | list):
        return [prompt_of(served, prompt, start=start)]
    if len(prompt) > MAX_ANSWERS:
        refuse("prompt", f"holds {len(prompt)} prompts, a request may have {MAX_ANSWERS}; send several requests")
    return [prompt_of(served, one, start=start, where=f"prompt[{place}]") for place, one in enumerate(prompt)]


def _fill_in_the_middle(served: Served, prompt: object, suffix: object) -> Prompt:
    """A prompt whose answer stands between two texts, by the marks that the tokenizer has for it."""
    tokenizer = tokenizer_of(served)
    marks = [tokenizer.special_id(f"<｜fim▁{word}｜>") for word in ("begin", "hole", "end")]
    if None in marks:
        refuse("suffix", "is not available: this model's tokenizer has no marks to fill in the middle; leave it out")
    texts = [text_field({name: text}, name, "") for name, text in (("prompt", prompt), ("suffix", suffix))]
    require_short(served, texts, "prompt")
    before, behind = (tokenizer.encode_text(text) for text in texts)
    begin, hole, end = (mark for mark in marks if mark is not None)
    first = [] if served.config.bos_token_id is None else [served.config.bos_token_id]
    return prompt_of(served, [*first, begin, *before, hole, *behind, end])


def prompt_of(served: Served, prompt: object, *, start: bool = True, where: str = "prompt") -> Prompt:
    """The prompt of one text, after a BOS if `start`, or of one list of token ids, taken as it is.

    Raises:
        PromptError: neither of them, or ids that stand for images.
        CapacityError: it is certain to be too long.
    """
    if isinstance(prompt, str):
        first = [served.config.bos_token_id] if start and served.config.bos_token_id is not None else []
        require_short(served, [prompt], where)
        prompt = [*first, *tokenizer_of(served).encode_text(prompt)]
    if not isinstance(prompt, list | tuple):
        refuse(where, f"must be a text or a list of token ids, not {json_kind(prompt)}")
    if len(prompt) > served.max_length:
        raise TooLongError(len(prompt), served.max_length, field=where)
    placeholder = resolve_placeholder(served.config, served.tokenizer)
    try:
        return prompt_from_parts([prompt], served.config, placeholder=placeholder)
    except PromptError as error:
        raise RequestError(f"{where}: {error}", field=where) from error


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
        usage_in_each: bool = False,
    ) -> None:
        self._id, self._created, self._model = f"cmpl-{uuid.uuid4().hex}", int(time.time()), model
        self._prompts, self._include_usage, self._usage_in_each = prompts, include_usage, usage_in_each
        self._tokens = Tokens(tokenizer_of(served), reasoning=False, with_logprobs=params.logprobs is not None)
        self._echoes = [self._shown(prompt) if echo else "" for prompt in prompts]
        self._decoders = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in prompts]
        self._offsets = [0] * len(prompts)
        self._waiting: list[list[TokenLogprob | None]] = [[] for _ in prompts]
        self._outputs: dict[int, RequestOutput] = {}
        self._streams, self._num_tokens = False, 0

    @property
    def malformed_tool_call(self) -> bool:
        """Nothing here is parsed."""
        return False

    def begin(self, request_id: str) -> bytes:
        """The prompts, if they are to be repeated."""
        self._streams = True
        return b"".join(self._chunk([self._choice(i, echo, None)]) for i, echo in enumerate(self._echoes) if echo)

    def push(self, index: int, delta: Delta) -> bytes:
        output = delta.output
        if output is not None:
            self._outputs[index] = output
        if not self._streams:
            return b""
        if output is not None and (wrong := failure(output)) is not None:
            return sse(openai_error(*wrong))
        self._waiting[index] += delta.logprobs or ()
        self._num_tokens += len(delta.token_ids)
        if not delta.text and output is None:
            return b""
        choice = self._choice(index, delta.text, output)
        return self._chunk([choice], **({"usage": self._usage(self._num_tokens)} if self._usage_in_each else {}))

    def end(self) -> bytes:
        """Usage, if it was asked for, and the end of the stream."""
        usage = self._chunk([], usage=self._usage()) if self._include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def whole(self, request_id: str) -> tuple[int, Mapping[str, Any]]:
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
        return sse({**self._head(), "choices": choices, **more})

    def _usage(self, num_tokens: int | None = None) -> dict[str, Any]:
        """Counts of all answers, or those of answers under way that have `num_tokens` together."""
        answers: dict[int, list[RequestOutput]] = {}
        for index, output in self._outputs.items():
            answers.setdefault(id(self._prompts[index]), []).append(output)
        prompts = {id(prompt): prompt for prompt in self._prompts}
        first, *more = (self._tokens.count(prompt, answers.get(key, ())) for key, prompt in prompts.items())
        counts = sum(more, start=first)
        return (counts if num_tokens is None else counts.with_completion(num_tokens)).chat()

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
        given = [None if entry is None else self._tokens.logprob(entry) for entry in entries]
        return {
            "tokens": list(map(self._tokens.text, ids)),
            "token_logprobs": [one and one["logprob"] for one in given],
            "top_logprobs": [one and {top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in given],
            "text_offset": offsets,
        }
