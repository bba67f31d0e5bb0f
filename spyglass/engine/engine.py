"""The one step loop: requests in, one packed forward pass per step, tokens out.

`prepare` checks, `submit` queues, `step` runs (`loop`), `abort` frees.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from functools import partial

import torch

from spyglass.config.cache import cache_plans
from spyglass.config.engine import EngineConfig
from spyglass.config.model import ModelConfig
from spyglass.engine.cache.allocator import CacheAllocator
from spyglass.engine.cache.images import ImageCache
from spyglass.engine.cache.pages import PageMemory
from spyglass.engine.cache.prefix import PrefixCache
from spyglass.engine.checks import check_params, check_prompt
from spyglass.engine.detokenize import Detokenizer, TokenBytes
from spyglass.engine.drafts import Drafter
from spyglass.engine.fit import prefix_bytes
from spyglass.engine.lead import LeadMemory
from spyglass.engine.loop import StepLoop
from spyglass.engine.ranks import Ranks
from spyglass.engine.request import Delta, SamplingParams
from spyglass.engine.runner import Runner
from spyglass.engine.scheduler import Scheduler
from spyglass.engine.sequence import Answer, Request, TokenSequence
from spyglass.engine.shares import ANYBODY, Client, make_pace
from spyglass.engine.stats import EngineStats
from spyglass.engine.structured.grammar import GrammarCompiler, GrammarMasks, Matcher, MinLength
from spyglass.engine.warm_up import largest_prompts
from spyglass.engram.feed import EngramFeed
from spyglass.errors import CapacityError, PromptError, SpyglassError
from spyglass.lora.use import NO_ADAPTER, AdapterHandle
from spyglass.prompt.tokens import Prompt
from spyglass.runtime.steps import ModelParts

_WAIT_BETWEEN_LAYERS, _WAIT_FOR_STEPS = 150, 1000  # defaults of `step_milliseconds`; short steps cost tokens


class Engine:
    """Runs requests on a model. Not thread-safe: one thread calls it.

    `banned` ids are never drawn. `allocator` lays out the memory, `prefixes` keeps parts of it (tests pass their own).
    Without `token_bytes` (a folder without a tokenizer) answers are ids only. `engram` brings the rows of models that
    have engram layers. `grammars` compiles what `structured` asks for; None = it is refused. `truncate` can take back
    `lookahead` tokens. `drafter` proposes next tokens, at most `lookahead` at a time, of which those are kept that
    would have been drawn; it needs the tokens of each step, so none runs ahead. `ranks` have the other parts of a model
    that is divided. `stored_rows`: memory holds rows in the formats that the model rounds them to.

    Raises:
        ConfigError: a step is too small for the largest image of the model, or `max_length` above the model's limit.
        CapacityError: `cache_bytes` is too small to run anything.
    """

    def __init__(
        self,
        model: ModelParts,
        config: ModelConfig,
        options: EngineConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        banned: Collection[int] = (),
        token_bytes: TokenBytes | None = None,
        allocator: CacheAllocator | None = None,
        prefixes: PrefixCache | None = None,
        engram: EngramFeed | None = None,
        grammars: GrammarCompiler | None = None,
        lookahead: int = 0,
        drafter: Drafter | None = None,
        ranks: Ranks | None = None,
        stored_rows: bool = False,
    ) -> None:
        options.check_model(config)
        self._config, self._device, self._token_bytes = config, device, token_bytes
        self._images = 0 if config.vision is None else options.images
        self.max_length = options.context_length(config.text.max_position_embeddings)
        self.allocator = allocator or CacheAllocator(
            cache_plans(config.text, lookahead, stored=stored_rows),
            dtype=dtype,
            device=device,
            max_sequences=options.max_sequences,
            step_tokens=options.max_step_tokens,
            max_length=self.max_length,
            cache_bytes=options.cache_bytes,
            memory=PageMemory if ranks is None else partial(LeadMemory, ranks),
        )
        if prefixes is None:
            most = prefix_bytes(device) if options.prefix_cache_bytes is None else options.prefix_cache_bytes
            prefixes = PrefixCache(self.allocator, most)
        self.prefixes, self.image_cache = prefixes, ImageCache(options.image_cache_bytes)
        auto = options.async_scheduling == "auto"
        ahead = (auto and device.type != "cpu") or options.async_scheduling == "on"
        between_layers = device.type == "cpu" and ranks is None and not ahead
        milliseconds = options.step_milliseconds
        if milliseconds is None:
            milliseconds = _WAIT_BETWEEN_LAYERS if between_layers else _WAIT_FOR_STEPS
        self._pace = make_pace(milliseconds / 1000, config.text.num_hidden_layers if between_layers else None)
        paced = self._pace if milliseconds else None
        self._scheduler = Scheduler(self.allocator, options.max_step_tokens, prefixes, paced)
        usable = sorted(set(banned) & set(range(config.text.vocab_size)) - set(config.eos_token_ids))
        banned_ids = torch.tensor(usable, dtype=torch.int64, device=device)
        self.runner = Runner(
            model,
            config,
            self.allocator,
            device,
            banned_ids,
            images=self.image_cache,
            engram=engram,
            capture=() if drafter is None else drafter.capture,
            lookahead=lookahead,
            ranks=ranks,
        )
        self._ranks = ranks
        self.step_runner = self.runner.steps
        self._grammars, self._lookahead = grammars, lookahead
        self._loop = StepLoop(
            self.runner,
            self._scheduler,
            self.allocator,
            prefixes,
            self.image_cache,
            GrammarMasks(config.text.vocab_size, usable, config.eos_token_ids),
            self._pace,
            ahead=ahead,
            lookahead=lookahead,
            drafter=drafter,
        )
        self._next_id = 0

    @property
    def vocab_size(self) -> int:
        """Columns of the logits (V)."""
        return self._config.text.vocab_size

    @property
    def sequences(self) -> Mapping[int, TokenSequence]:
        """Requests that have not ended, by id."""
        return self._loop.sequences

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._loop.has_work

    def stats(self) -> EngineStats:
        """Counters and gauges of now; cheap enough for every step."""
        prefixes, images = self.prefixes.counts, self.image_cache.counts
        return EngineStats(
            **asdict(self._loop.counted),
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            cache_share=self.allocator.share_used(self.prefixes.spare_pages()),
            preemptions=self._scheduler.preemptions,
            prefix_queries=prefixes.queried_tokens,
            prefix_hits=prefixes.found_tokens,
            image_queries=images.queries,
            image_hits=images.hits,
            prefix_evictions=prefixes.evictions,
            image_evictions=images.evictions,
            prefix_bytes=prefixes.bytes_held,
            image_bytes=images.bytes_held,
            mask_share=self._loop.masks.hidden_share or 0.0,
        )

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        sink: torch.Tensor | None = None,
        *,
        adapter: AdapterHandle = NO_ADAPTER,
    ) -> int:
        """`submit` of what `prepare` makes of a prompt: a grammar is compiled here, which may take seconds."""
        return self.submit(self.prepare(prompt, params), sink, adapter=adapter)

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Check everything about a request that does not depend on memory, and compile its grammar. Any thread.

        Raises:
            PromptError: the prompt is empty, has ids outside the vocabulary, or its parameters cannot be honoured.
            CapacityError: it is longer than the model's limit.
        """
        check_prompt(prompt, self._config, images=self._images)
        check_params(params, prompt, self.max_length, self.vocab_size, spelled=self._token_bytes is not None)
        matcher: Matcher | None = None
        if params.min_tokens:
            ends = {*params.stop_token_ids, *self._config.eos_token_ids}
            matcher = MinLength(params.min_tokens, ends, self.vocab_size)
        if params.structured is not None:
            if self._grammars is None:
                raise PromptError(
                    "structured answers need a tokenizer, and this model folder has none; add tokenizer.json"
                )
            matcher = self._grammars.begin(params.structured)
        return Request(prompt=prompt, params=params, matcher=matcher)

    def submit(
        self,
        request: Request,
        sink: torch.Tensor | None = None,
        *,
        adapter: AdapterHandle = NO_ADAPTER,
        client: Client = ANYBODY,
    ) -> int:
        """Queue a prepared request; returns its id. `sink` float32 [T, V] receives the logits of every prompt position.
        Requests of several clients share the engine fairly (`scheduler`).

        Without `max_tokens` the answer may be as long as the model's limit and the memory allow.

        Raises:
            CapacityError: it could never fit into the memory or a step.
        """
        prompt, params = request.prompt, request.params
        answer = Answer(
            request,
            limit=self._answer_limit(prompt, params),
            ends={*params.stop_token_ids, *(() if params.ignore_eos else self._config.eos_token_ids)},
            detokenizer=None
            if self._token_bytes is None
            else Detokenizer(self._token_bytes, params.stop, params.stop_after),
            lookahead=self._lookahead,
        )
        seed = secrets.randbits(64) if params.seed is None else params.seed
        sequence = TokenSequence(self._next_id, request, answer, seed=seed, adapter=adapter, client=client, sink=sink)
        self._loop.add(sequence)
        self._next_id += 1
        return sequence.request_id

    def abort(self, request_id: int) -> Delta | None:
        """End a request now and free everything it holds; its last delta, or None if it is not running."""
        return self._loop.abort(request_id)

    def truncate(self, request_id: int, tokens: int) -> None:
        """Take back the last `tokens` tokens of an answer under way, at most `answer.revocable`, as if never drawn.

        What was delivered of them stays delivered; the output at the end is without them.
        """
        self._loop.truncate(request_id, tokens)

    def step(self, deliver: Callable[[list[Delta]], object] | None = None) -> list[Delta]:
        """Run one step; what it added to each answer, or, where steps run one ahead, what the step before it added.

        A step that takes long because of prompts lets the answers of others go on between its layers (`Pace`). What
        that adds is given to `deliver` at once, which must not call the engine; without it, it comes with the rest.

        If the model fails, or a request cannot go on, the error comes through. The requests of that step, or those that
        cannot go on, are over: what they held is free, and the next call returns their last deltas. All others go on,
        but where a rank of a divided model has ended (RankError).
        """
        if self._ranks is not None:
            self._ranks.require_alive()
        return self._loop.step(deliver)

    def warm_up(self, tokens: int = 1) -> None:
        """Run the largest images (if the model sees) and a token of text through everything; nothing is left behind.

        Each prompt is filled with text up to `tokens` tokens. For an engine that has no requests.

        Raises:
            CapacityError: the device has no memory for them.
            SpyglassError: the model gives no finite logits.
        """
        assert not self._loop.has_work, "an engine is warmed up before its first request"
        counted = replace(self._loop.counted)
        fits = min(self.max_length, self.allocator.max_tokens_alone or self.max_length)
        try:
            for prompt in largest_prompts(self._config, images=self._images > 0, tokens=min(tokens, fits - 1)):
                if len(prompt) < fits:  # else a request with this image is refused too
                    self.add(prompt, SamplingParams(temperature=0, max_tokens=1))
            while self.has_work:
                wrong = [delta.output.error for delta in self.step() if delta.output is not None and delta.output.error]
                if wrong:
                    raise SpyglassError(f"warming up failed: {wrong[0]}")
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"a step with the largest image does not fit into what {self._device} has left beside weights and "
                "rows; lower cache_bytes or max_step_tokens"
            ) from error
        finally:
            self._loop.clear()
            self._pace.forget()
            self.prefixes.clear()
            self.image_cache.clear()
            self._loop.counted = counted

    def _answer_limit(self, prompt: Prompt, params: SamplingParams) -> int:
        room = self.max_length - len(prompt)
        if params.max_tokens is not None:
            return min(params.max_tokens, room)
        most = self.allocator.max_tokens_alone
        return room if most is None else max(1, min(room, most - len(prompt)))
