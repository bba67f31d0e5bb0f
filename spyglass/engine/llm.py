"""`LLM`: a checkpoint folder that answers. Prompts of any kind go in together; the engine's one loop runs them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, overload

import numpy as np
import torch

from spyglass.config.engine import EngineConfig, read_engine_config
from spyglass.config.model import ModelConfig
from spyglass.config.shipped import find_model
from spyglass.engine.detokenize import TokenBytes
from spyglass.engine.engine import Engine
from spyglass.engine.grammar import Forms
from spyglass.engine.request import Delta, RequestOutput, SamplingParams
from spyglass.engram.feed import EngramFeed
from spyglass.engram.store import open_engram
from spyglass.errors import CapacityError, PromptError, SpyglassError
from spyglass.model import find_device, load_model
from spyglass.plan import host_memory, require_room
from spyglass.prompt.build import Part, build_prompt, is_picture, prompt_from_parts
from spyglass.prompt.chat import Effort
from spyglass.prompt.decode import PYTHON_LIMITS
from spyglass.prompt.interop import VLLM_FIRST_ID
from spyglass.prompt.placeholder import RELEASED_VOCABULARY, resolve_placeholder
from spyglass.prompt.tokenizer import PromptTokenizer, load_tokenizer
from spyglass.prompt.tokens import Prompt, TokenKind

Messages = Sequence[Mapping[str, Any]]
PromptLike = str | Prompt | Sequence[int] | Sequence[Part]
_R = TypeVar("_R")
_PAD_SPELLING = "<｜▁pad▁｜>"
_PROMPT = "a prompt is text, token ids, a Prompt or a list of id lists and pictures; conversations go to `chat`"


class LLM:
    """A model with its tokenizer and engine.

    `path` is a checkpoint folder or a shipped model's name. The options are those of `EngineConfig`, which documents
    each; one left out (None) comes from its `SPYGLASS_*` variable or its default. A folder without tokenizer.json
    serves ids and pictures. `threads` is set for the whole process, `progress` shows a bar. `name` is the folder's.

    Raises:
        ConfigError: config.json or an option means nothing.
        CheckpointError: the files do not hold what config.json promises.
        CapacityError: the weights are larger than the free memory.
        DeviceError: a device, dtype or op choice that is not to be had here.
        PromptError: the tokenizer contradicts the checkpoint.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: str | None = None,
        dtype: Literal["auto", "float32", "bfloat16"] | None = None,
        numerics: Literal["auto", "plain", "reference"] | None = None,
        images: int | None = None,
        *,
        ops: Literal["auto", "reference"] | None = None,
        vision_graphs: Literal["auto", "on", "off"] | None = None,
        expand_weights: bool | None = None,
        max_step_tokens: int | None = None,
        max_sequences: int | None = None,
        max_length: int | None = None,
        cache_bytes: int | None = None,
        engram: Literal["mmap", "host", "device"] | None = None,
        threads: int | None = None,
        progress: bool = False,
    ) -> None:
        stated = {
            "device": device,
            "dtype": dtype,
            "numerics": numerics,
            "images": images,
            "ops": ops,
            "vision_graphs": vision_graphs,
            "expand_weights": expand_weights,
            "max_step_tokens": max_step_tokens,
            "max_sequences": max_sequences,
            "max_length": max_length,
            "cache_bytes": cache_bytes,
            "engram": engram,
            "threads": threads,
        }
        path = find_model(path)
        self.name = path.resolve().name
        self.options = options = read_engine_config(stated)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        place = find_device(
            ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
        )
        _require_room(path, place, options)
        self.tokenizer: PromptTokenizer | None = load_tokenizer(path)
        self.loaded = load_model(
            path,
            device=place,
            dtype=options.dtype,
            numerics=options.numerics,
            images=options.images > 0,
            ops=options.ops,
            vision_graphs=options.vision_graphs,
            expand=options.expand_weights,
            progress=progress,
        )
        self.config: ModelConfig = self.loaded.config
        self._placeholder = resolve_placeholder(self.config, self.tokenizer)
        token_bytes = None if self.tokenizer is None else TokenBytes(self.tokenizer)
        self.engine = Engine(
            self.loaded.model,
            self.config,
            options,
            dtype=self.loaded.dtype,
            device=self.loaded.device,
            banned=self._never_drawn(),
            token_bytes=token_bytes,
            forms=None if token_bytes is None else Forms(token_bytes, self.config),
            engram=self._open_engram(path),
        )
        self._mail: dict[int, deque[Delta]] = {}

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers to prompts of any kinds and lengths, run together.

        A prompt is text (raw, after a BOS), a list of token ids (taken as it is), a `Prompt`, or a list of parts:
        token-id lists, pictures (PIL, bytes, path, data URL) and `Patches` in prompt order. A list that holds a picture
        is one prompt in parts. `params`: one for all, or one each. All are checked before any runs.

        Raises:
            PromptError: a prompt or its parameters cannot be used; the message says which.
            CapacityError: a prompt is too long for the model or the memory.
        """
        many = [cast("PromptLike", prompts)] if _is_one_prompt(prompts) else _listed(prompts, _PROMPT)
        return self._run(self._build_all(many, self._prompt), params)

    @overload
    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        thinking: bool = False,
        effort: Effort | None = None,
    ) -> RequestOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: bool = False,
        effort: Effort | None = None,
    ) -> list[RequestOutput]: ...

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: bool = False,
        effort: Effort | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """The answer to a conversation in OpenAI form, or the answers to a list of conversations.

        Picture parts: `{"type": "image_url", "image_url": {"url": ...}}` with a data URL, bytes, a `pathlib.Path` or a
        PIL picture. `thinking` lets the model reason first; `effort` says how much.

        Raises:
            PromptError: malformed messages or pictures, or a model that takes none.
            CapacityError: a prompt is too long for the model or the memory.
        """
        one = _is_conversation(messages)
        many = [cast("Messages", messages)] if one else _listed(messages, "a conversation is a list of messages")
        outputs = self._run(
            self._build_all(many, lambda chat: self.chat_prompt(chat, thinking=thinking, effort=effort)), params
        )
        return outputs[0] if one else outputs

    def stream(
        self,
        request: PromptLike | Messages,
        params: SamplingParams | None = None,
        *,
        thinking: bool = False,
        effort: Effort | None = None,
    ) -> Iterator[Delta]:
        """The answer to one prompt (as in `generate`) or conversation (as in `chat`), piece by piece.

        The last piece carries the whole `output`. Several streams may be read in turn; closing one ends its request.

        Raises:
            PromptError, CapacityError: as `generate`, at the latest when the first piece is asked for.
        """
        if _is_conversation(request):
            prompt = self.chat_prompt(cast("Messages", request), thinking=thinking, effort=effort)
        else:
            prompt = self._prompt(cast("PromptLike", request))
        return self._stream(prompt, _params_each(params, 1)[0])

    def logits(self, parts: Sequence[int] | Sequence[Part]) -> torch.Tensor:
        """Logits float32 [T, V], on the host, of every position of a prompt, picture blocks included.

        The prompt is given as in `generate`: parts in order, or just token ids.

        Raises:
            PromptError, CapacityError: as `generate`.
        """
        prompt, params = self._prompt(parts), SamplingParams(max_tokens=0)
        self.engine.check(prompt, params)  # before memory is taken for the answer
        out_TV = _logits_of(prompt, self.config)
        request = self.engine.add(prompt, params, sink=out_TV)
        self._mail[request] = deque()
        for delta in self._follow(request):
            if delta.output is not None and delta.output.error is not None:
                raise SpyglassError(delta.output.error)
        return out_TV

    def chat_prompt(self, messages: Messages, *, thinking: bool = False, effort: Effort | None = None) -> Prompt:
        """The `Prompt` of a conversation, as `chat` runs it.

        Raises:
            PromptError: as `chat`.
        """
        limits = replace(PYTHON_LIMITS, images=self.options.images or PYTHON_LIMITS.images)
        return build_prompt(messages, self.config, self.tokenizer, thinking=thinking, effort=effort, limits=limits)

    def _open_engram(self, path: str | os.PathLike[str]) -> EngramFeed | None:
        """The tables of a model with engram layers, placed as the options say."""
        if self.config.text.engram is None:
            return None
        store = open_engram(Path(path), self.config, placement=self.options.engram)
        return EngramFeed(store, device=self.loaded.device, dtype=self.loaded.dtype)

    def _build_all(self, requests: Sequence[_R], build: Callable[[_R], Prompt]) -> list[Prompt]:
        prompts = []
        for number, request in enumerate(requests):
            with _naming(number, len(requests)):
                prompts.append(build(request))
        return prompts

    def _prompt(self, prompt: PromptLike) -> Prompt:
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise PromptError(
                    "text needs a tokenizer, and this model folder has none; give ids, or add tokenizer.json"
                )
            ids = [self.config.bos_token_id, *self.tokenizer.encode_text(prompt)]
            return prompt_from_parts([ids], self.config, placeholder=self._placeholder)
        parts = [cast("Part", prompt)] if _is_ids(prompt) or is_picture(prompt) else _listed(prompt, _PROMPT)
        limits = replace(PYTHON_LIMITS, images=self.options.images or PYTHON_LIMITS.images)
        return prompt_from_parts(parts, self.config, limits=limits, placeholder=self._placeholder)

    def _run(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        requests: list[int] = []
        outputs: list[RequestOutput] = []
        try:
            for number, (prompt, each) in enumerate(zip(prompts, _params_each(params, len(prompts)), strict=True)):
                with _naming(number, len(prompts)):
                    requests.append(self._add(prompt, each))
            for request in requests:
                *_, last = self._follow(request)
                assert last.output is not None
                outputs.append(last.output)
        finally:
            for request in requests[len(outputs) :]:
                self._cancel(request)
        return outputs

    def _add(self, prompt: Prompt, params: SamplingParams) -> int:
        request = self.engine.add(prompt, params)
        self._mail[request] = deque()
        return request

    def _stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[Delta]:
        """Queued when the first piece is asked for, so that a stream nobody reads costs nothing."""
        yield from self._follow(self._add(prompt, params))

    def _follow(self, request: int) -> Iterator[Delta]:
        """Deltas of one request; steps run as they are needed, and what they bring for others is kept for them."""
        try:
            while True:
                while not self._mail[request]:
                    for delta in self.engine.step():
                        if delta.request_id in self._mail:
                            self._mail[delta.request_id].append(delta)
                delta = self._mail[request].popleft()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._cancel(request)

    def _cancel(self, request: int) -> None:
        self.engine.abort(request)
        self._mail.pop(request, None)

    def _never_drawn(self) -> set[int]:
        """Ids that mean something only in prompts: BOS, pad, placeholder, reserved tokens that play picture roles."""
        banned = {self.config.bos_token_id, self.config.pad_token_id, self.config.image_token_id, self._placeholder}
        if self.tokenizer is not None:
            banned.add(self.tokenizer.special_id(_PAD_SPELLING))
        if self.config.text.vocab_size == RELEASED_VOCABULARY:
            banned.update(range(VLLM_FIRST_ID, VLLM_FIRST_ID + len(TokenKind) - 1))
        return {token for token in banned if token is not None}


def _require_room(path: str | os.PathLike[str], place: torch.device, options: EngineConfig) -> None:
    """Refuse a model that would not fit before a byte of it is read."""
    if place.type == "cuda":
        unused = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)  # kept by torch for later use
        free = torch.cuda.mem_get_info(place)[0] + unused
    else:
        memory = host_memory()
        if memory.total == 0:  # a system that does not tell
            return
        free = memory.free
    beside = options.engram == "device" or (options.engram == "host" and place.type == "cpu")
    require_room(path, free, pictures=options.images > 0, expand=options.expand_weights, tables=beside)


@contextmanager
def _naming(number: int, count: int) -> Iterator[None]:
    """An error of one request of several says which."""
    try:
        yield
    except SpyglassError as error:
        if count == 1:
            raise
        raise type(error)(f"request {number}: {error}") from error


def _is_conversation(request: object) -> bool:
    return isinstance(request, Sequence) and len(request) > 0 and isinstance(request[0], Mapping)


def _is_ids(prompt: object) -> bool:
    """A flat list of token ids, rather than a list of parts or prompts."""
    if isinstance(prompt, np.ndarray | torch.Tensor):
        return True
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], int | np.integer)


def _is_one_prompt(prompts: object) -> bool:
    if isinstance(prompts, str | Prompt) or is_picture(prompts) or _is_ids(prompts):
        return True
    return isinstance(prompts, Sequence) and any(is_picture(p) and not isinstance(p, str) for p in prompts)


def _listed(value: object, expected: str) -> list[Any]:
    """The items of a list or tuple.

    Raises:
        PromptError: it is neither; `expected` says what it should be.
    """
    if not isinstance(value, Sequence):
        raise PromptError(f"{expected}; this is a {type(value).__name__}")
    return list(value)


def _params_each(params: object, count: int) -> Sequence[SamplingParams]:
    """One `SamplingParams` for each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise PromptError("params are one SamplingParams for all prompts, or a list with one for each")
    if len(params) != count:
        raise PromptError(f"{count} prompts with {len(params)} SamplingParams; give one for all, or one each")
    return params


def _logits_of(prompt: Prompt, config: ModelConfig) -> torch.Tensor:
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
