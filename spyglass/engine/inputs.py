"""What callers of `LLM` may hand over, checked: one prompt or many, conversations, one value for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from spyglass.config.model import ModelConfig
from spyglass.engine.request import SamplingParams
from spyglass.errors import AdapterError, CapacityError, PromptError, SpyglassError
from spyglass.prompt.build import is_image
from spyglass.prompt.tokens import Prompt

AdapterNames = str | None | Sequence[str | None]


@contextmanager
def naming(number: int, count: int) -> Iterator[None]:
    """An error of one request of several says which."""
    try:
        yield
    except SpyglassError as error:
        if count == 1:
            raise
        raise type(error)(f"request {number}: {error}") from error


def is_conversation(request: object) -> bool:
    """A list of messages, rather than a prompt."""
    return isinstance(request, Sequence) and len(request) > 0 and isinstance(request[0], Mapping)


def is_ids(prompt: object) -> bool:
    """A flat list of token ids, rather than a list of parts or prompts."""
    if isinstance(prompt, np.ndarray | torch.Tensor):
        return True
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], int | np.integer)


def is_one_prompt(prompts: object) -> bool:
    """Text, ids, a `Prompt` or a list with an image in it, rather than a list of prompts."""
    if isinstance(prompts, str | Prompt) or is_image(prompts) or is_ids(prompts):
        return True
    return isinstance(prompts, Sequence) and any(is_image(p) and not isinstance(p, str) for p in prompts)


def listed(value: object, expected: str) -> list[Any]:
    """The items of a list or tuple.

    Raises:
        PromptError: it is neither; `expected` says what it should be.
    """
    if not isinstance(value, Sequence):
        raise PromptError(f"{expected}; this is a {type(value).__name__}")
    return list(value)


def params_each(params: object, count: int) -> Sequence[SamplingParams]:
    """One `SamplingParams` for each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise PromptError("params are one SamplingParams for all prompts, or a list with one for each")
    if len(params) != count:
        raise PromptError(f"{count} prompts with {len(params)} SamplingParams; give one for all, or one each")
    return params


def adapters_each(adapter: object, count: int) -> Sequence[str | None]:
    """The name of an adapter, or None, for each of `count` prompts.

    Raises:
        AdapterError: something else was given, or not one for each.
    """
    if adapter is None or isinstance(adapter, str):
        return [adapter] * count
    if not isinstance(adapter, Sequence) or not all(name is None or isinstance(name, str) for name in adapter):
        raise AdapterError("adapter is the name of one for all prompts, or a list with a name or None for each")
    if len(adapter) != count:
        raise AdapterError(f"{count} prompts with {len(adapter)} adapters; give one for all, or one each")
    return adapter


def logits_of(prompt: Prompt, config: ModelConfig) -> torch.Tensor:
    """Memory for the logits of every position, float32 [T, V].

    Raises:
        CapacityError: this machine does not have it.
    """
    shape = (len(prompt), config.text.vocab_size)
    try:
        return torch.empty(shape, dtype=torch.float32)
    except RuntimeError as error:  # what torch's allocator raises
        raise CapacityError(
            f"the logits of {shape[0]} positions take {4 * shape[0] * shape[1]:,} bytes, which this machine does not "
            "have; ask for log-probabilities (prompt_logprobs), or give a shorter prompt"
        ) from error
