"""What a caller asks of a prompt and what comes back: `SamplingParams` in, `Delta` while it runs, `RequestOutput` last.

All values are checked when they are made, so that nothing inside the step loop can fail on them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, Literal

from spyglass.errors import PromptError

FinishReason = Literal["stop", "length", "abort"]
StructuredKind = Literal["json", "json_schema", "regex", "choice", "grammar"]
SHUTTING_DOWN = "the server is shutting down"  # the error of an answer that was ended for it
_SEEDS = 1 << 64
THINK_END = "</think>"  # the end of an answer's reasoning
_EXPECTED: Mapping[str, tuple[type | UnionType, str]] = {
    "json": (NoneType, "no value"), "json_schema": (dict | bool, "a schema"), "regex": (str, "a text, not empty"),
    "choice": (tuple, "texts"), "grammar": (str, "a text, not empty"),
}  # fmt: skip
MAX_LOGPROBS = 1000  # a token's list of a whole vocabulary takes megabytes; `LLM.logits` gives all of them at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Structured:
    """What every answer must look like. `value` by kind: "json" None (any JSON object), "json_schema" a schema as dict,
    "regex" a pattern of the whole answer, "choice" a tuple of texts, "grammar" a grammar in EBNF (GBNF or Lark).

    With reasoning the rule holds after `</think>`: `after` is that special token, None = from the first token on.

    Raises:
        PromptError: an unknown kind, or a value that is not of its kind. What it says is read by the engine.
    """

    kind: StructuredKind
    value: Any = None
    after: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in _EXPECTED:
            raise PromptError(f"structured is of the unknown kind {self.kind!r}; kinds are {', '.join(_EXPECTED)}")
        expected, what = _EXPECTED[self.kind]
        if self.kind == "choice":
            object.__setattr__(self, "value", _items("choice", self.value))
            if not self.value or not all(isinstance(text, str) and text for text in self.value):
                raise PromptError("a choice is a list of non-empty texts, one at least")
        elif not isinstance(self.value, expected) or self.value == "":
            raise PromptError(f"structured of kind {self.kind} has the value {repr(self.value)[:100]}, expected {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How an answer is drawn. Penalties first, then temperature, top_k, top_p, min_p.

    `temperature` 0 = always the most likely token; at most 1e6. `top_k` 0 = off: keep tokens with fewer than k strictly
    likelier ones. `top_p`: keep tokens whose strictly likelier ones have less than this mass, after top_k. `min_p`:
    keep tokens at least this times as likely as the top one. `repetition_penalty`, 0.01 to 100, divides positive and
    multiplies negative logits of tokens of prompt or answer; of tokens of the answer, `presence_penalty` is subtracted
    once, `frequency_penalty` once per occurrence. `seed` None = a fresh one per request. `stop` strings end the answer
    and are not part of its text, with `stop_after` only behind that text; `stop_token_ids` end it too, as end-of-text
    ids do unless `ignore_eos`. `min_tokens`: no end token before so many.
    `max_tokens` None = as long as the model's limit allows; 0 = only the prompt is run.
    `logprobs` n = log-probability of each chosen token and of the n most likely, at most 1,000; `prompt_logprobs` the
    same for the prompt. Log-probabilities are the model's own: before bans, biases, penalties and temperature.
    `logit_bias` is added to the logits of token ids, -100 to 100, before penalties. `structured` restricts the answer
    to structured output: a `Structured`, a Pydantic class or a JSON schema; the answer ends where its grammar does.

    Raises:
        PromptError: a value is out of range; the message names the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_after: str | None = None
    stop_token_ids: Sequence[int] = ()
    max_tokens: int | None = 256
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    structured: Any = None  # a `Structured` or None once the object is made

    def __post_init__(self) -> None:
        object.__setattr__(self, "structured", _as_structured(self.structured))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _items("stop_token_ids", self.stop_token_ids))
        _require_number("temperature", self.temperature, "from 0 to 1e6", lambda x: 0 <= x <= 1e6)
        _require_number("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1)
        _require_number("min_p", self.min_p, "from 0 to 1", lambda x: 0 <= x <= 1)
        _require_number("repetition_penalty", self.repetition_penalty, "from 0.01 to 100", lambda x: 0.01 <= x <= 100)
        _require_number("presence_penalty", self.presence_penalty, "from -2 to 2", lambda x: -2 <= x <= 2)
        _require_number("frequency_penalty", self.frequency_penalty, "from -2 to 2", lambda x: -2 <= x <= 2)
        _require_count("top_k", self.top_k)
        _require_count("min_tokens", self.min_tokens)
        for name, most in (("max_tokens", None), ("logprobs", MAX_LOGPROBS), ("prompt_logprobs", MAX_LOGPROBS)):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name), most)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise PromptError(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}")
        if self.min_tokens and self.structured is not None:
            raise PromptError("min_tokens cannot be had with structured output, which ends where it ends; drop one")
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < _SEEDS):
            raise PromptError(f"seed is {_shown(self.seed)}, expected None or an integer from 0 to 2**64 - 1")
        _require_biases(self.logit_bias)
        if not isinstance(self.ignore_eos, bool):
            raise PromptError(f"ignore_eos is {self.ignore_eos!r}, expected True or False")
        for text in self.stop if self.stop_after is None else (*self.stop, self.stop_after):
            if not isinstance(text, str) or not text:
                raise PromptError(f"stop or stop_after holds {text!r}, expected non-empty strings")
        for token in self.stop_token_ids:
            if not _is_int(token) or token < 0:
                raise PromptError(f"stop_token_ids holds {_shown(token)}, expected token ids (integers from 0)")

    @property
    def penalised(self) -> bool:
        """Whether the sampler must know which tokens have been used."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_greedy(self) -> bool:
        """Whether each token is that of the model's largest logit, and no other logit is asked for."""
        return self.temperature == 0 and self.logprobs is None and not (self.logit_bias or self.penalised)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one token, and the most likely (id, log-probability) pairs at its position, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts. `prompt_tokens` counts every prompt position, of which `image_tokens` belong to images."""

    prompt_tokens: int
    image_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def picture_tokens(self) -> int:
        """Deprecated name of `image_tokens`."""
        warnings.warn("Usage.picture_tokens is now image_tokens", DeprecationWarning, stacklevel=2)
        return self.image_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished answer. `token_ids` include the id that ended it; `text` excludes stop strings and stop ids.

    `reasoning` is what `LLM.chat` with thinking took out of the text, where it came first; None without thinking.

    `prompt_logprobs` has one entry per prompt position; None for the first and for image positions. `error` says why
    the engine itself ended the answer ("abort"), `grammar_violation` that it was for the structured output the request
    asked for, `stopped_by` which stop string ended it.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: str | None = None
    grammar_violation: bool = False
    stopped_by: str | None = None
    reasoning: str | None = None

    @property
    def misfit(self) -> bool:
        """Deprecated name of `grammar_violation`."""
        warnings.warn("RequestOutput.misfit is now grammar_violation", DeprecationWarning, stacklevel=2)
        return self.grammar_violation


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to one answer. The last one of a request has `finish_reason` and the whole `output`.

    `text` may be empty while a character or a possible stop string is incomplete; it is never taken back.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None


def _as_structured(value: object) -> Structured | None:
    if value is None or isinstance(value, Structured):
        return value
    if isinstance(value, Mapping):
        return Structured(kind="json_schema", value=dict(value))
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        return Structured(kind="json_schema", value=value.model_json_schema())
    raise PromptError(f"structured is {repr(value)[:100]}, expected a Structured, a Pydantic class or a JSON schema")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_biases(value: object) -> None:
    if not isinstance(value, Mapping):
        raise PromptError(f"logit_bias is {value!r}, expected token ids and what to add to their logits")
    for token, bias in value.items():
        if not _is_int(token) or token < 0:
            raise PromptError(f"logit_bias holds {_shown(token)}, expected token ids (integers from 0)")
        _require_number(f"logit_bias of {token}", bias, "from -100 to 100", lambda x: -100 <= x <= 100)


def _items(name: str, value: object) -> tuple[Any, ...]:
    """What a list holds; None, which clients send for "not stated", holds nothing."""
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise PromptError(f"{name} is {repr(value)[:100]}, expected a list")
    return tuple(value)


def _require_count(name: str, value: object, most: int | None = None) -> None:
    if not _is_int(value) or value < 0 or (most is not None and value > most):  # type: ignore[operator]  # an int
        span = "of at least 0" if most is None else f"from 0 to {most}"
        raise PromptError(f"{name} is {_shown(value)}, expected an integer {span}")


def _require_number(name: str, value: object, expected: str, ok: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not ok(value):
        raise PromptError(f"{name} is {_shown(value)}, expected a number {expected}")


def _shown(value: object) -> str:
    """A value in a message; an integer too long for Python to spell out (4,300 digits) stays unsaid."""
    return "too long" if isinstance(value, int) and value.bit_length() > 4096 else repr(value)
