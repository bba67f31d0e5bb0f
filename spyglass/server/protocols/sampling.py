"""Sampling fields of the protocols, and the ones that other engines add to them, to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from spyglass.config.fields import integer
from spyglass.config.json_file import parse_json_text
from spyglass.engine.request import THINK_END, SamplingParams, Structured
from spyglass.errors import PromptError, json_kind
from spyglass.server.limits import (
    MAX_ANSWERS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
)
from spyglass.server.protocols.fields import NEVER, FieldReader, Fields, RequestError, refuse

# Fields of the same name in `SamplingParams`; those that a protocol does not have itself come as extra fields.
_NATIVE = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"})
_EXTRA = frozenset({"top_k", "min_tokens", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos"})
_FORMATS = frozenset({"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"})
# What other engines (vLLM, SGLang, llama.cpp) add and scripts send at its neutral value.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True, False),
    "include_stop_str_in_output": (False,), "use_beam_search": (False,), "num_beams": (1,), "best_of": (1,),
    "length_penalty": (1,), "early_stopping": (False,), "no_stop_trim": (False,), "no_repeat_ngram_size": (0,),
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,), "prompt_logprobs": (0,),
    "return_hidden_states": (False,), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "separate_reasoning": (True,), "stream_reasoning": (True,), "include_reasoning": (True,),
    "mm_processor_kwargs": ({},), "truncate_prompt_tokens": (-1,), "allowed_token_ids": ([],), "bad_words": ([],),
    "logits_processors": ([],), "custom_logit_processor": NEVER, "documents": ([],), "chat_template": NEVER,
    "typical_p": (1,), "top_a": (0,), "tfs_z": (1,), "mirostat": (0,), "mirostat_mode": (0,), "smoothing_factor": (0,),
    "xtc_probability": (0,), "dry_multiplier": (0,), "dynatemp_range": (0,), "repeat_penalty": (1,), "n_keep": (0,),
    "temperature_last": (False,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "regex": ("",), "ebnf": ("",),
    "grammar": ("",), "json_schema": ("", {}), "format": ("",), "n_predict": (-1,),
    "guided_decoding": NEVER, "structural_tag": NEVER, "vllm_xargs": ({},), "samplers": NEVER,
}  # fmt: skip
_HARMLESS = frozenset(
    {"guided_decoding_backend", "guided_whitespace_pattern", "priority", "cache_prompt", "request_id", "cache_salt"}
    | {"kv_transfer_params", "id_slot", "slot_id", "session_id", "timings_per_token", "rid", "n_probs", "user"}
)
STREAM_OPTIONS = Fields(
    read=frozenset({"include_usage", "continuous_usage_stats"}), ignored=frozenset({"include_obfuscation"})
)
STRUCTURED_FIELDS = Fields(
    read=frozenset({"json", "regex", "choice", "grammar", "json_object"}),
    ignored=frozenset({"backend", "disable_fallback", "whitespace_pattern"}),
    neutral={
        "structural_tag": NEVER,
        "disable_any_whitespace": (True, False),
        "disable_additional_properties": (False,),
    },
)


def sampled_fields(
    *,
    read: Set[str],
    ignored: Set[str],
    neutral: Mapping[str, tuple[object, ...]],
    inner: Mapping[str, Fields | tuple[Fields, ...]],
) -> Fields:
    """A protocol's own fields of a request that draws tokens, beside those that all protocols take."""
    return Fields(
        read=_NATIVE | _EXTRA | _FORMATS | read,
        ignored=_HARMLESS | ignored,
        neutral={**_NEUTRAL, **neutral},
        inner={"structured_outputs": STRUCTURED_FIELDS, **inner},
    )


def sampling(given: Mapping[str, Any], names: Mapping[str, str] | None = None, **named: Any) -> SamplingParams:
    """Parameters from the fields of a request; `named` are those that the protocol has elsewhere, or calls otherwise:
    then `names` says how, by their names here.

    Raises:
        PromptError: a value is out of range; the message names the field as the request has it.
    """
    values = {name: given[name] for name in (*_NATIVE, *_EXTRA) if name in given and not _means_none(name, given[name])}
    named = {name: value for name, value in named.items() if not _means_none(name, value)}
    _check_stops(named.get("stop"), values.get("stop_token_ids"))
    if given.get("logit_bias"):
        values["logit_bias"] = _biases(given["logit_bias"])
    try:
        return SamplingParams(**values, **{name: value for name, value in named.items() if value is not None})
    except PromptError as error:
        name, _, why = str(error).partition(" ")
        if name not in (names or {}):
            raise
        refuse((names or {})[name], why)


def schema_at(where: str, value: Any, kind: Any = "json_schema") -> Structured:
    """The structure of answer that the request asks for at a place.

    Raises:
        RequestError: the value is none of its kind.
    """
    try:
        return Structured(kind=kind, value=value)
    except PromptError as error:
        told = str(error)
        why = told.removeprefix(f"structured of kind {kind} ")
        refuse(where, why if why != told else f"cannot be used: {told}")


def _means_none(name: str, value: object) -> bool:
    """How other engines write that a field is off."""
    return (name == "stop" and value in ("", [""])) or (name in ("top_k", "seed") and value == -1)


def limit_field(given: Mapping[str, Any], names: Sequence[str]) -> str:
    """Which of the fields of a length limit a request has."""
    return next((name for name in names if name in given), names[0])


def token_limit(
    given: Mapping[str, Any],
    names: Sequence[str],
    default: int,
    *,
    logprobs: object = None,
    prompts: int = 1,
    field: str = "logprobs",
) -> Any:
    """The first of the fields of a length limit that is given; -1 means none, as other engines write it.

    Answers x tokens x `logprobs`, which the request has in `field`, are bounded: a default is made to fit.

    Raises:
        RequestError: what is given does not.
    """
    limit = next((given[name] for name in names if name in given and given[name] != -1), None)
    count = given.get("n", 1)
    if not isinstance(logprobs, int) or not isinstance(count, int):
        return default if limit is None else limit
    each = max(1, count) * prompts * (1 + max(0, logprobs))
    if limit is None:
        return max(1, min(default, MAX_LOGPROBS // each))
    if isinstance(limit, int) and each * limit > MAX_LOGPROBS:
        refuse(
            field,
            f"of {count} answers with {limit} tokens and {logprobs} alternatives each are more than {MAX_LOGPROBS:,} "
            "numbers; ask for fewer",
        )
    return limit


def answers(params: SamplingParams, count: object) -> tuple[SamplingParams, ...]:
    """One set of parameters per answer; answer i has the seed i above the one given.

    Raises:
        RequestError: the number is none that can be.
    """
    count = 1 if count is None else count
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_ANSWERS:
        refuse("n", f"is {str(count)[:40]}, expected an integer from 1 to {MAX_ANSWERS}")
    if params.seed is None:
        return (params,) * count
    return tuple(replace(params, seed=(params.seed + number) % (1 << 64)) for number in range(count))


def asked_format(
    given: Mapping[str, Any], own: Structured | None, reader: FieldReader, *, thinking: bool
) -> Structured | None:
    """What the answer must look like: `own`, which the protocol itself asks for, or what the extra fields say.

    Raises:
        RequestError: more than one format, or one that means nothing.
    """
    formats = [] if own is None else [own]
    for name in sorted(_FORMATS & given.keys()):
        if name == "structured_outputs":
            inner = reader.read(given[name], STRUCTURED_FIELDS, name)
            formats += [_format(kind, value, f"{name}.{kind}") for kind, value in inner.items() if value is not False]
        else:
            formats.append(_format(name.removeprefix("guided_"), given[name], name))
    if len(formats) > 1:
        raise RequestError("the request asks for more than one format of answer; give one")
    if not formats:
        return None
    return replace(formats[0], after=THINK_END) if thinking else formats[0]


def _format(kind: str, value: Any, where: str) -> Structured:
    if kind == "json_object":
        return Structured(kind="json")
    if kind != "json":
        return schema_at(where, value, kind)
    if isinstance(value, str):
        try:
            value = parse_json_text(value)
        except (ValueError, RecursionError) as error:
            refuse(where, f"is text that is not JSON: {error}")
    return schema_at(where, value)


def _check_stops(stops: object, tokens: object) -> None:
    """Every token drawn is held against each of them: a few are enough, and many would slow down everybody."""
    for name, values, limit in (("stop strings", stops, MAX_STOPS), ("stop_token_ids", tokens, MAX_STOP_IDS)):
        if isinstance(values, list | tuple) and len(values) > limit:
            raise PromptError(f"the request has {len(values)} {name}, it may have {limit}")
    for text in stops if isinstance(stops, list | tuple) else [stops]:
        if isinstance(text, str) and len(text) > MAX_STOP_CHARS:
            raise PromptError(f"a stop string has {len(text)} characters, it may have {MAX_STOP_CHARS}")


def _biases(value: object) -> Mapping[int, Any]:
    if not isinstance(value, Mapping):
        refuse("logit_bias", f"must be an object of token ids, not {json_kind(value)}")
    if len(value) > MAX_BIASES:
        refuse("logit_bias", f"has {len(value):,} tokens, it may have {MAX_BIASES:,}")
    biases = {}
    for text, bias in value.items():
        try:
            token = integer(text)
        except ValueError:
            refuse("logit_bias", f"has the key {text[:40]!r}, expected the digits of a token id")
        if token in biases:
            refuse("logit_bias", f"names the token {token} twice; give it once")
        biases[token] = bias
    return biases
