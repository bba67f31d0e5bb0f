"""`LLM`: a checkpoint folder that answers. Prompts of any kind go in together; the engine's one loop runs them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, cast, overload

import torch

from spyglass.config import read_model_config
from spyglass.config.engine import NumbersMode, read_engine_config
from spyglass.config.model import ModelConfig
from spyglass.config.shipped import find_adapter, model_name
from spyglass.engine.detokenize import TokenBytes
from spyglass.engine.engine import Engine
from spyglass.engine.fit import read_fitting, require_fit
from spyglass.engine.inputs import (
    AdapterNames,
    adapter_places,
    adapters_each,
    behind_reasoning,
    conversation,
    is_conversation,
    is_ids,
    is_one_prompt,
    listed,
    logits_of,
    naming,
    params_each,
    without_reasoning,
)
from spyglass.engine.loading import load_checked, load_parts
from spyglass.engine.request import Delta, RequestOutput, SamplingParams
from spyglass.engine.sequence import Request
from spyglass.engine.structured.grammar import GrammarCompiler
from spyglass.engine.workspace import with_cache_bytes, with_pace
from spyglass.errors import AdapterError, PromptError, SpyglassError
from spyglass.lora.new import TrainableAdapter, new_adapter
from spyglass.lora.peft import read_adapter
from spyglass.lora.use import NO_ADAPTER, AdapterHandle, adapter_name
from spyglass.model import find_device, model_folder
from spyglass.params.declared import AdapterGroup
from spyglass.prompt.build import Part, build_prompt, is_image, prompt_from_parts
from spyglass.prompt.chat import Effort
from spyglass.prompt.decode import PYTHON_LIMITS, ImageInput
from spyglass.prompt.placeholder import banned_tokens, resolve_placeholder
from spyglass.prompt.tokenizer import PromptTokenizer, load_tokenizer
from spyglass.prompt.tokens import Prompt

Messages = Sequence[Mapping[str, Any]]
PromptLike = str | Prompt | Sequence[int] | Sequence[Part]
_R = TypeVar("_R")
_CHAT = "a conversation is a text or a list of messages"
_PROMPT = "a prompt is text, token ids, a Prompt or a list of id lists and images; conversations go to `chat`"


class LLM:
    """A model with its tokenizer and engine.

    `path` is a folder, a shipped model's name or a hub id (`ORG/NAME[@revision]`, downloaded if need be). The options
    are those of `EngineConfig`; one left out (None) comes from its `SPYGLASS_*` variable or its default. A folder
    without tokenizer.json serves ids and images. `threads` is set for the whole process, `progress` shows a bar.
    `adapters`: PEFT folders or names of shipped adapters, by the name that a request asks for, or in a list.

    Raises:
        ConfigError, CheckpointError: config.json or an option means nothing; the files do not hold what it promises.
        CapacityError: weights and adapters are larger than the free memory.
        DeviceError: a device, dtype or op choice that is not to be had here.
        PromptError: the tokenizer contradicts the checkpoint.
        AdapterError: an adapter is damaged or does not fit the model, or its name is none.
        RankError: a process of a divided model ended or failed.
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
        numbers: NumbersMode | None = None,
        vision_graphs: Literal["auto", "on", "off"] | None = None,
        expand_weights: bool | None = None,
        max_step_tokens: int | None = None,
        step_milliseconds: int | None = None,
        max_sequences: int | None = None,
        max_length: int | None = None,
        cache_bytes: int | None = None,
        gpu_memory_utilization: float | None = None,
        prefix_cache_bytes: int | None = None,
        image_cache_bytes: int | None = None,
        grammar_seconds: int | None = None,
        engram: Literal["mmap", "host", "device"] | None = None,
        experts: str | None = None,
        load: Literal["files", "dummy"] | None = None,
        async_scheduling: Literal["auto", "on", "off"] | None = None,
        tensor_parallel_size: int | None = None,
        threads: int | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | Sequence[str | os.PathLike[str]] | None = None,
        progress: bool = False,
    ) -> None:
        given = {
            name: value for name, value in locals().items() if name not in ("self", "path", "adapters", "progress")
        }
        self.options = options = read_engine_config(given)
        self._path = path = model_folder(path, options.load)
        self.name = model_name(path)
        best = "cuda" if torch.cuda.is_available() else "cpu"
        place = find_device(best if options.device == "auto" else options.device)
        config = read_model_config(path)
        options.check_model(config)
        places = {adapter_name(name): find_adapter(at, path) for name, at in adapter_places(adapters).items()}
        files = {name: read_adapter(place, config) for name, place in places.items()}
        hosted = require_fit(path, place, options, sum(file.bank_bytes() for file in files.values()))
        self.tokenizer: PromptTokenizer | None = load_tokenizer(path)
        read = partial(load_parts, path, options, place, files, progress, hosted)
        parts, self.numbers = load_checked(read, options.numbers)
        self.loaded, self.lora, engram_feed, self.ranks = parts.loaded, parts.lora, parts.engram, parts.ranks
        self.config: ModelConfig = self.loaded.config
        self._images = replace(PYTHON_LIMITS, images=options.images or PYTHON_LIMITS.images)
        self._placeholder = resolve_placeholder(self.config, self.tokenizer)
        self.banned_tokens = banned_tokens(self.config, self.tokenizer, self._placeholder)
        token_bytes = None if self.tokenizer is None else TokenBytes(self.tokenizer)
        self.engine = Engine(
            self.loaded.model,
            self.config,
            with_pace(with_cache_bytes(options, self.loaded, engram_feed, self.ranks), self.loaded),
            dtype=self.loaded.dtype,
            device=self.loaded.device,
            banned=self.banned_tokens,
            token_bytes=token_bytes,
            grammars=None
            if token_bytes is None
            else GrammarCompiler(token_bytes, self.config, cpu_seconds=options.grammar_seconds),
            engram=engram_feed,
            ranks=self.ranks,
            stored_rows=self.loaded.stores_rows,
        )
        self._deltas: dict[int, deque[Delta]] = {}
        self._users: dict[int, str] = {}  # requests under way that use an adapter

    def close(self) -> None:
        """End the other processes of a divided model; it happens by itself when this one ends."""
        if self.ranks is not None:
            self.ranks.close()

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterNames = None,
    ) -> list[RequestOutput]:
        """Answers to prompts of any kinds and lengths, run together.

        A prompt is text (raw, after a BOS), a list of token ids (taken as it is), a `Prompt`, or a list of parts:
        token-id lists, images (PIL, bytes, path, data URL) and `Patches` in prompt order. A list that holds an image
        is one prompt in parts. `params`: one for all, or one each, and so the name of an `adapter` (None = without).
        All are checked before any runs.

        Raises:
            PromptError: a prompt or its parameters cannot be used; the message says which.
            CapacityError: a prompt is too long for the model or the memory.
            AdapterError: no adapter has that name; the known ones are listed.
        """
        many = [cast("PromptLike", prompts)] if is_one_prompt(prompts) else listed(prompts, _PROMPT)
        return self._run(self._build_all(many, self._prompt), params, adapter)

    @overload
    def chat(  # type: ignore[overload-overlap]  # a text is one conversation
        self,
        messages: str | Messages,
        params: SamplingParams | None = None,
        *,
        images: ImageInput | Sequence[ImageInput] = (),
        thinking: bool = False,
        effort: Effort | None = None,
        adapter: str | None = None,
    ) -> RequestOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[str | Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: bool = False,
        effort: Effort | None = None,
        adapter: AdapterNames = None,
    ) -> list[RequestOutput]: ...

    def chat(
        self,
        messages: str | Messages | Sequence[str | Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        images: ImageInput | Sequence[ImageInput] = (),
        thinking: bool = False,
        effort: Effort | None = None,
        adapter: AdapterNames = None,
    ) -> RequestOutput | list[RequestOutput]:
        """The answer to a conversation in OpenAI form or to a text, or the answers to a list of them.

        `images` (paths, bytes, PIL, data URLs; one or a list) stand before the text of the last message. Image parts:
        `{"type": "image_url", "image_url": {"url": ...}}` with a data URL, bytes, a `pathlib.Path` or a PIL image.
        `thinking` lets the model reason first; `effort` says how much. The output has it as `reasoning`.

        Raises:
            PromptError, CapacityError: as `generate`, for malformed messages too.
        """
        one = isinstance(messages, str) or is_conversation(messages)
        many = [
            conversation(chat, images) for chat in ([cast("Messages", messages)] if one else listed(messages, _CHAT))
        ]
        prompts = self._build_all(many, lambda chat: self.chat_prompt(chat, thinking=thinking, effort=effort))
        params = [behind_reasoning(each) for each in params_each(params, len(many))] if thinking else params
        outputs = self._run(prompts, params, adapter)
        outputs = [without_reasoning(output) for output in outputs] if thinking else outputs
        return outputs[0] if one else outputs

    def stream(
        self,
        request: PromptLike | Messages,
        params: SamplingParams | None = None,
        *,
        thinking: bool = False,
        effort: Effort | None = None,
        adapter: str | None = None,
    ) -> Iterator[Delta]:
        """The answer to one prompt (as in `generate`) or conversation (as in `chat`), piece by piece.

        The last piece carries the whole `output`. Several streams may be read in turn; closing one ends its request.
        With `thinking` the pieces are what the model writes: its reasoning, `</think>`, the answer.

        Raises:
            PromptError, CapacityError: as `generate`, at the latest when the first piece is asked for.
        """
        if is_conversation(request):
            prompt = self.chat_prompt(cast("Messages", request), thinking=thinking, effort=effort)
        else:
            prompt = self._prompt(cast("PromptLike", request))
        return self._stream(prompt, params_each(params, 1)[0], adapter)

    def logits(self, parts: Sequence[int] | Sequence[Part], *, adapter: str | None = None) -> torch.Tensor:
        """Logits float32 [T, V], on the host, of every position of a prompt, image blocks included.

        The prompt is given as in `generate`: parts in order, or just token ids.

        Raises:
            PromptError, CapacityError: as `generate`.
        """
        prompt, params = self._prompt(parts), SamplingParams(max_tokens=0)
        request = self.engine.prepare(prompt, params)  # before memory is taken for the answer
        out_TV = logits_of(prompt, self.config)
        for delta in self._follow(self._submit(request, adapter, out_TV)):
            if delta.output is not None and delta.output.error is not None:
                raise SpyglassError(delta.output.error)
        return out_TV

    def chat_prompt(self, messages: Messages, *, thinking: bool = False, effort: Effort | None = None) -> Prompt:
        """The `Prompt` of a conversation, as `chat` runs it.

        Raises:
            PromptError: as `chat`.
        """
        return build_prompt(
            messages, self.config, self.tokenizer, thinking=thinking, effort=effort, limits=self._images
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters, in the order they came."""
        return self.lora.names

    def adapter_use(self, name: str | None) -> AdapterHandle:
        """What `Engine.add` takes for the adapter of this name; None = none.

        Raises:
            AdapterError: no adapter has this name; the known ones are listed.
        """
        return NO_ADAPTER if name is None else self.lora.use(name)

    def adapter_counts(self, name: str) -> Mapping[AdapterGroup, int]:
        """Modules of an adapter by group. Raises AdapterError as `adapter_use`."""
        return self.lora[name].counts

    def add_adapter(self, name: str, directory: str | os.PathLike[str], *, factor: float = 1.0) -> None:
        """Read a PEFT folder and hold it beside the others; what it adds is multiplied by `factor`.

        Raises:
            AdapterError, CapacityError: the name is taken, it is damaged or does not fit; nothing has changed then.
        """
        file = read_fitting(find_adapter(directory, self._path), self.config, self.loaded.device)
        self.lora.attach(adapter_name(name), file, factor=factor)

    def new_adapter(
        self, targets: Iterable[str], *, rank: int, alpha: float, rslora: bool = False, seed: int = 0
    ) -> TrainableAdapter:
        """A fresh adapter to train beside every module of the groups `targets`; see `lora.new.TrainableAdapter`.

        Raises:
            AdapterError: a group cannot be trained, rank or alpha mean nothing, or the model holds another adapter.
        """
        return new_adapter(self.loaded.model, targets, rank=rank, alpha=alpha, rslora=rslora, seed=seed)

    def remove_adapter(self, name: str) -> None:
        """Give the memory of an adapter back.

        Raises:
            AdapterError: no adapter has this name, or answers that use it are under way.
        """
        count = list(self._users.values()).count(name)
        if count:
            raise AdapterError(f"the adapter {name!r} is used by {count} answers under way; end them, or wait")
        self.lora.detach(name)

    def _build_all(self, requests: Sequence[_R], build: Callable[[_R], Prompt]) -> list[Prompt]:
        prompts = []
        for number, request in enumerate(requests):
            with naming(number, len(requests)):
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
        parts = [cast("Part", prompt)] if is_ids(prompt) or is_image(prompt) else listed(prompt, _PROMPT)
        return prompt_from_parts(parts, self.config, limits=self._images, placeholder=self._placeholder)

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: AdapterNames,
    ) -> list[RequestOutput]:
        requests: list[int] = []
        outputs: list[RequestOutput] = []
        try:
            each = zip(prompts, params_each(params, len(prompts)), adapters_each(adapter, len(prompts)), strict=True)
            for number, request in enumerate(each):
                with naming(number, len(prompts)):
                    requests.append(self._submit(self.engine.prepare(*request[:2]), request[2]))
            for request_id in requests:
                *_, last = self._follow(request_id)
                assert last.output is not None
                outputs.append(last.output)
        finally:
            for request_id in requests[len(outputs) :]:
                self._cancel(request_id)
        return outputs

    def _submit(self, request: Request, adapter: str | None, sink: torch.Tensor | None = None) -> int:
        number = self.engine.submit(request, sink, adapter=self.adapter_use(adapter))
        self._deltas[number] = deque()
        if adapter is not None:
            self._users[number] = adapter
        return number

    def _stream(self, prompt: Prompt, params: SamplingParams, adapter: str | None) -> Iterator[Delta]:
        """Queued when the first piece is asked for, so that a stream nobody reads costs nothing."""
        yield from self._follow(self._submit(self.engine.prepare(prompt, params), adapter))

    def _follow(self, request: int) -> Iterator[Delta]:
        """Deltas of one request; steps run as they are needed, and what they bring for others is kept for them."""
        try:
            while True:
                while not self._deltas[request]:
                    assert self.engine.has_work, "the end of this answer went astray"
                    for delta in self.engine.step():
                        if delta.request_id in self._deltas:
                            self._deltas[delta.request_id].append(delta)
                yield (delta := self._deltas[request].popleft())
                if delta.finish_reason is not None:
                    return
        finally:
            self._cancel(request)

    def _cancel(self, request: int) -> None:
        self.engine.abort(request)
        self._deltas.pop(request, None)
        self._users.pop(request, None)
