"""Sampling fields of the protocols, and the ones that other engines add to them, to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spyglass.config.json_file import parse_json_text
from spyglass.config.fields import integer
from spyglass.engine.request import SamplingParams, Structured
from spyglass.errors import PromptError
from spyglass.server.fields import Fields, read_fields
from spyglass.server.markup import THINK_END

MOST_ANSWERS = 128
MOST_STOPS, STOP_CHARS, MOST_STOP_IDS = 16, 1000, 128  # the first is the model makers' own, four times OpenAI's
# Fields of the same name in `SamplingParams`; those that a protocol does not have itself come as extra fields.
NATIVE = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"})
EXTRA = frozenset({"top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos"})
FORMS = frozenset({"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"})
STREAM_OPTIONS = Fields(read=frozenset({"include_usage"}), ignored=frozenset({"include_obfuscation"}))
_FORM_FIELDS = Fields(read=frozenset({"json", "regex", "choice", "grammar", "json_object"}))


def sampling(body: Mapping[str, Any], **given: Any) -> SamplingParams:
    """Parameters from the fields of a request; `given` are those that the protocol names otherwise.

    Raises:
        PromptError: a value is out of range; the message names the field.
    """
    stated = {name: body[name] for name in (*NATIVE, *EXTRA) if name in body}
    _check_stops(given.get("stop"), stated.get("stop_token_ids"))
    if "logit_bias" in body:
        stated["logit_bias"] = _biases(body["logit_bias"])
    return SamplingParams(**stated, **{name: value for name, value in given.items() if value is not None})


def answers(params: SamplingParams, count: object) -> tuple[SamplingParams, ...]:
    """One set of parameters per answer; answer i has the seed i above the one stated.

    Raises:
        PromptError: the number is none that can be.
    """
    count = 1 if count is None else count
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_ANSWERS:
        raise PromptError(f"n is {count!r}, expected an integer from 1 to {MOST_ANSWERS}")
    if params.seed is None:
        return (params,) * count
    return tuple(replace(params, seed=(params.seed + number) % (1 << 64)) for number in range(count))


def stated_form(body: Mapping[str, Any], form: Structured | None, *, thinking: bool) -> Structured | None:
    """What the answer must look like: `form`, which the protocol itself asks for, or what the extra fields say.

    Raises:
        PromptError: more than one form, or one that means nothing.
    """
    forms = [] if form is None else [form]
    for name in sorted(FORMS & body.keys()):
        if name == "structured_outputs":
            inner, _ = read_fields(body[name], _FORM_FIELDS, name)
            forms += [_form(kind, value, f"{name}.{kind}") for kind, value in inner.items() if value is not False]
        else:
            forms.append(_form(name.removeprefix("guided_"), body[name], name))
    if len(forms) > 1:
        raise PromptError("the request asks for more than one form of answer; state one")
    if not forms:
        return None
    return replace(forms[0], after=THINK_END) if thinking else forms[0]


def _form(kind: str, value: Any, where: str) -> Structured:
    if kind == "json_object":
        return Structured(kind="json")
    if kind == "json":
        return Structured(kind="json_schema", value=_schema(value, where))
    return Structured(kind=kind, value=value)  # type: ignore[arg-type]  # checked there


def _schema(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json_text(value)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where} is text that is not JSON: {error}") from error


def _check_stops(stops: object, tokens: object) -> None:
    """Every token drawn is held against each of them: a few are enough, and many would slow down everybody."""
    for name, values, most in (("stop strings", stops, MOST_STOPS), ("stop_token_ids", tokens, MOST_STOP_IDS)):
        if isinstance(values, list | tuple) and len(values) > most:
            raise PromptError(f"the request has {len(values)} {name}, it may have {most}")
    for text in stops if isinstance(stops, list | tuple) else [stops]:
        if isinstance(text, str) and len(text) > STOP_CHARS:
            raise PromptError(f"a stop string has {len(text)} characters, it may have {STOP_CHARS}")


def _biases(value: object) -> Mapping[int, Any]:
    if not isinstance(value, Mapping):
        raise PromptError(f"logit_bias must be an object of token ids, not {type(value).__name__}")
    biases = {}
    for text, bias in value.items():
        try:
            token = integer(text)
        except ValueError:
            raise PromptError(f"logit_bias has the key {text[:40]!r}, expected the digits of a token id") from None
        if token in biases:
            raise PromptError(f"logit_bias names the token {token} twice; state it once")
        biases[token] = bias
    return biases
