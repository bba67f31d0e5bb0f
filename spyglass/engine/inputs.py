"""What callers of `LLM` may hand over, checked: one prompt or many, conversations, one value for all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spyglass.config.model import ModelConfig
from spyglass.engine.request import THINK_END, RequestOutput, SamplingParams
from spyglass.errors import AdapterError, CapacityError, PromptError, SpyglassError
from spyglass.prompt.build import is_image
from spyglass.prompt.data_url import is_data_url
from spyglass.prompt.decode import ImageInput
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


def conversation(
    chat: str | Sequence[Mapping[str, Any]], images: ImageInput | str | Sequence[ImageInput | str] | None = ()
) -> Sequence[Mapping[str, Any]]:
    """The messages of a chat; a text is what the user says. `images`, one or a list given from Python, stand before the
    text of the last message; a text among them is a path, unless it is a data URL.

    Raises:
        PromptError: images, and no message of the user at the end to hold them.
    """
    messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    given = images if isinstance(images, list | tuple) else [] if images is None else [images]
    if not given:
        return messages
    last = messages[-1] if is_conversation(messages) else {}
    if last.get("role") != "user" or not isinstance(last.get("content"), str | list | tuple):
        raise PromptError("images go to the user's message at the end of the conversation, and there is none")
    sources = [Path(one) if isinstance(one, str) and not is_data_url(one) else one for one in given]
    said = last["content"]
    parts = [{"type": "text", "text": said}] if isinstance(said, str) else list(said)
    seen = [{"type": "image_url", "image_url": {"url": source}} for source in sources]
    return [*messages[:-1], {**last, "content": [*seen, *parts]}]


def behind_reasoning(params: SamplingParams) -> SamplingParams:
    """Parameters of an answer that begins with reasoning: structured output comes behind it, unless it says where."""
    if params.structured is None or params.structured.after is not None:
        return params
    return replace(params, structured=replace(params.structured, after=THINK_END))


def without_reasoning(output: RequestOutput) -> RequestOutput:
    """An answer that began with reasoning, the two apart. One that ended of itself inside it is both, as the server
    gives it."""
    reasoning, end, text = output.text.partition(THINK_END)
    if not end:
        text = reasoning if output.finish_reason == "stop" and output.stopped_by is None else ""
    return replace(output, reasoning=reasoning.strip(), text=text.lstrip())


def adapter_places(adapters: object) -> dict[str, Any]:
    """Folders or shipped names of adapters by the names that requests choose them by; a list names each by its last
    part.

    Raises:
        AdapterError: neither of them.
    """
    if adapters is None:
        return {}
    if isinstance(adapters, Mapping):
        return dict(adapters)
    if isinstance(adapters, str | os.PathLike):
        adapters = [adapters]
    if not isinstance(adapters, Sequence) or not all(isinstance(one, str | os.PathLike) for one in adapters):
        raise AdapterError("adapters are folders or names of shipped adapters, in a list or by name")
    return {Path(one).name: one for one in adapters}


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
