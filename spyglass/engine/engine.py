"""The one step loop: requests in, one packed forward pass per step, tokens out.

`add` checks and queues, `step` runs, `abort` frees. Everything that draws tokens or reads logits goes through `step`.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace

import torch

from spyglass.config.cache import cache_plans
from spyglass.config.engine import EngineConfig
from spyglass.config.model import ModelConfig
from spyglass.engine.answers import keep_prompt_logprobs, last_delta
from spyglass.engine.cache.allocator import CacheAllocator
from spyglass.engine.cache.images import ImageCache
from spyglass.engine.cache.prefix import PrefixCache
from spyglass.engine.checks import check_params, check_prompt, check_step_size
from spyglass.engine.detokenize import Detokenizer, TokenBytes
from spyglass.engine.fit import prefix_bytes
from spyglass.engine.request import Delta, FinishReason, SamplingParams, TokenLogprob
from spyglass.engine.runner import Runner, StepOutput
from spyglass.engine.sampler import SampledTokens, SampleInput, draw
from spyglass.engine.scheduler import Scheduler, StuckError
from spyglass.engine.sequence import Chunk, Request, TokenSequence, matchers_of
from spyglass.engine.stats import Counters, EngineStats
from spyglass.engine.structured.grammar import GrammarCompiler, GrammarMasks, GrammarMatcher
from spyglass.engine.warm_up import largest_prompts
from spyglass.engram.feed import EngramFeed
from spyglass.errors import CapacityError, PromptError, SpyglassError
from spyglass.lora.use import NO_ADAPTER, AdapterHandle
from spyglass.prompt.tokens import Prompt
from spyglass.runtime.steps import ModelParts

_FAILED = "the model failed in a step of this request"
_LOG = logging.getLogger(__name__)
LOGITS_AT_ONCE = 1 << 24  # elements of one block of logits when every row is wanted
_Masking = Callable[[], torch.Tensor] | None  # next tokens of rows that follow a grammar, once known


class Engine:
    """Runs requests on a model. Not thread-safe: one thread calls it.

    `banned` ids are never drawn. `allocator` lays out the memory, `prefixes` keeps parts of it (tests pass their own).
    Without `token_bytes` (a folder without a tokenizer) answers are ids only. `engram` brings the rows of models that
    have engram layers. `grammars` compiles what `structured` asks for; None = it is refused.

    Raises:
        ConfigError: a step is too small for the largest picture of the model.
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
    ) -> None:
        check_step_size(config, options)
        self._config, self._device, self._token_bytes = config, device, token_bytes
        self._images = 0 if config.vision is None else options.images
        limit = config.text.max_position_embeddings
        self.max_length = limit if options.max_length is None else min(options.max_length, limit)
        self.allocator = allocator or CacheAllocator(
            cache_plans(config.text),
            dtype=dtype,
            device=device,
            max_sequences=options.max_sequences,
            step_tokens=options.max_step_tokens,
            max_length=self.max_length,
            cache_bytes=options.cache_bytes,
        )
        if prefixes is None:
            most = prefix_bytes(device) if options.prefix_cache_bytes is None else options.prefix_cache_bytes
            prefixes = PrefixCache(self.allocator, most)
        self.prefixes, self.image_cache = prefixes, ImageCache(options.image_cache_bytes)
        self._scheduler = Scheduler(self.allocator, options.max_step_tokens, prefixes)
        usable = sorted(set(banned) & set(range(config.text.vocab_size)) - set(config.eos_token_ids))
        self._banned = torch.tensor(usable, dtype=torch.int64, device=device)
        self._runner = Runner(
            model,
            config,
            self.allocator,
            device,
            self._banned,
            prefixes=prefixes,
            images=self.image_cache,
            engram=engram,
        )
        self.step_runner = self._runner.steps
        self._grammars, self._masks = grammars, GrammarMasks(config.text.vocab_size, usable, config.eos_token_ids)
        self._sequences: dict[int, TokenSequence] = {}
        self._lost: list[Delta] = []  # last deltas of requests whose step failed, for the next call of `step`
        self._next_id = 0
        self._counted = Counters()

    @property
    def vocab_size(self) -> int:
        """Columns of the logits (V)."""
        return self._config.text.vocab_size

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sequences or self._lost)

    def stats(self) -> EngineStats:
        """Counters and gauges of now; cheap enough for every step."""
        prefixes, images = self.prefixes.counts, self.image_cache.counts
        return EngineStats(
            **asdict(self._counted),
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
            mask_share=self._masks.hidden_share or 0.0,
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
        matcher: GrammarMatcher | None = None
        if params.structured is not None:
            if self._grammars is None:
                raise PromptError(
                    "structured answers need a tokenizer, and this model folder has none; add tokenizer.json"
                )
            matcher = self._grammars.begin(params.structured)
        return Request(prompt=prompt, params=params, matcher=matcher)

    def submit(self, request: Request, sink: torch.Tensor | None = None, *, adapter: AdapterHandle = NO_ADAPTER) -> int:
        """Queue a prepared request; returns its id. `sink` float32 [T, V] receives the logits of every prompt position.

        Without `max_tokens` the answer may be as long as the model's limit and the memory allow.

        Raises:
            CapacityError: it could never fit into the memory or a step.
        """
        prompt, params = request.prompt, request.params
        sequence = TokenSequence(
            self._next_id,
            prompt,
            params,
            limit=self._answer_limit(prompt, params),
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            detokenizer=None
            if self._token_bytes is None
            else Detokenizer(self._token_bytes, params.stop, params.stop_after),
            sink=sink,
            adapter=adapter,
            matcher=None if request.matcher is None else request.matcher.copy(),
        )
        self._scheduler.add(sequence)
        self._sequences[sequence.request_id] = sequence
        self._next_id += 1
        self._counted.prompt_tokens += len(prompt)
        return sequence.request_id

    def abort(self, request_id: int) -> Delta | None:
        """End a request now and free everything it holds; its last delta, or None if it is not running."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._finish(sequence, "abort", (), "")

    def warm_up(self, tokens: int = 1) -> None:
        """Run the largest pictures (if the model sees) and a token of text through everything; nothing is left behind.

        Each prompt is filled with text up to `tokens` tokens. For an engine that has no requests.

        Raises:
            CapacityError: the device has no memory for them.
            SpyglassError: the model gives no sound answer.
        """
        assert not self._sequences, "an engine is warmed up before its first request"
        counted = replace(self._counted)
        fits = min(self.max_length, self.allocator.most_tokens or self.max_length)
        try:
            for prompt in largest_prompts(self._config, pictures=self._images > 0, tokens=min(tokens, fits - 1)):
                if len(prompt) < fits:  # else a request with this picture is refused too
                    self.add(prompt, SamplingParams(temperature=0, max_tokens=1))
            while self.has_work:
                wrong = [delta.output.error for delta in self.step() if delta.output is not None and delta.output.error]
                if wrong:
                    raise SpyglassError(f"warming up failed: {wrong[0]}")
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"a step with the largest picture does not fit into what {self._device} has left beside weights and "
                "rows; lower cache_bytes or max_step_tokens"
            ) from error
        finally:
            self._lost.clear()
            for request in list(self._sequences):
                self.abort(request)
            self.prefixes.clear()
            self.image_cache.clear()
            self._counted = counted

    def step(self) -> list[Delta]:
        """Run one step; what it added to each answer.

        If the model fails, or a request cannot go on, the error comes through. The requests of that step, or those that
        cannot go on, are over: what they held is free, and the next call returns their last deltas. All others go on.
        """
        if self._lost:
            lost, self._lost = self._lost, []
            return lost
        began = time.perf_counter()
        try:
            chunks = self._scheduler.schedule()
        except StuckError as error:
            self._lost = self._give_up(error.sequences, str(error))
            raise
        if not chunks:
            return []
        done = False
        deltas: list[Delta] = []
        try:
            with torch.inference_mode():
                drawing = [chunk.sequence for chunk in chunks if chunk.draws]
                matchers = [matcher for _, matcher in matchers_of(drawing)]
                masks = self._masks.begin(matchers) if matchers else None
                output = self._runner.run(chunks, argmax=all(sequence.is_greedy for sequence in drawing))
                self._score(chunks, output)
                if len(drawing) < len(chunks):
                    closed = [c.sequence for c in chunks if c.stop == c.sequence.length and not c.draws]
                    deltas += [self._finish(sequence, "length", (), "") for sequence in closed]
                if drawing:
                    self._draw(drawing, output, deltas, masks)
            done = True
            self._count(chunks, deltas, time.perf_counter() - began)
        finally:
            if not done:
                self._lost = deltas + self._give_up([chunk.sequence for chunk in chunks], _FAILED)
        return deltas

    def _answer_limit(self, prompt: Prompt, params: SamplingParams) -> int:
        """Most tokens of the answer."""
        room = self.max_length - len(prompt)
        if params.max_tokens is not None:
            return min(params.max_tokens, room)
        most = self.allocator.most_tokens
        return room if most is None else max(1, min(room, most - len(prompt)))

    def _count(self, chunks: Sequence[Chunk], deltas: Sequence[Delta], seconds: float) -> None:
        counted = self._counted
        counted.steps += 1
        counted.step_seconds += seconds
        counted.computed_tokens += sum([chunk.stop - chunk.start for chunk in chunks])
        counted.generated_tokens += sum([len(delta.token_ids) for delta in deltas])

    def _score(self, chunks: Sequence[Chunk], output: StepOutput) -> None:
        """Logits of all rows of those who want them, in blocks so that no second [T, V] exists."""
        step = max(1, LOGITS_AT_ONCE // self._config.text.vocab_size)
        for chunk, first in zip(chunks, output.first, strict=True):
            sequence = chunk.sequence
            stop = min(chunk.stop, len(sequence.prompt))
            if sequence.sink is None and sequence.params.prompt_logprobs is None:
                continue
            for start in range(chunk.start, stop, step):
                count = min(step, stop - start)
                row = first + start - chunk.start
                logits_RV = self._runner.logits(output.hidden_TC, torch.arange(row, row + count, device=self._device))
                if sequence.sink is not None:
                    sequence.sink[start : start + count] = logits_RV
                if sequence.params.prompt_logprobs is not None:
                    keep_prompt_logprobs(sequence, start, logits_RV)

    def _draw(self, drawing: Sequence[TokenSequence], output: StepOutput, deltas: list[Delta], masks: _Masking) -> None:
        """A token for every sequence whose tokens are all computed."""
        drawn = self._runner.argmax(output) or self._sample(drawing, output, masks)
        for sequence, token, logprob, sound in zip(drawing, drawn.ids, drawn.logprobs, drawn.sound, strict=True):
            deltas.append(self._accept_alone(sequence, token, logprob) if sound else self._refuse(sequence))

    def _sample(self, drawing: Sequence[TokenSequence], output: StepOutput, masks: _Masking) -> SampledTokens:
        logits_SV = self._runner.logits(output.hidden_TC, output.draw_rows)
        step = SampleInput(
            params=[s.params for s in drawing],
            seed_S=[s.seed for s in drawing],
            position_S=[s.length for s in drawing],
            used=[None if s.counts is None else s.counts.used for s in drawing],
            grammar_rows=[row for row, _ in matchers_of(drawing)],
            allowed=None if masks is None else masks(),
        )
        began = time.perf_counter()
        drawn = draw(logits_SV, step, self._banned)
        self._counted.sampling_seconds += time.perf_counter() - began
        return drawn

    def _accept_alone(self, sequence: TokenSequence, token: int, logprob: TokenLogprob | None) -> Delta:
        """Take a drawn token; whatever goes wrong with the text or the grammar of one answer ends only that answer."""
        try:
            return self._accept(sequence, token, logprob)
        except Exception as error:
            _LOG.exception("request %d is over", sequence.request_id)
            why = f"the engine failed on this answer ({type(error).__name__})"
            return self._finish(sequence, "abort", (token,), "", flush=False, error=why)

    def _accept(self, sequence: TokenSequence, token: int, logprob: TokenLogprob | None) -> Delta:
        """Append a drawn token, and end the answer where it ends."""
        params = sequence.params
        sequence.append(token)
        if logprob is not None:
            sequence.logprobs.append(logprob)
        reason: FinishReason | None = None
        text = ""
        wrong = None if sequence.matcher is None else sequence.matcher.push(token)
        if wrong is not None:
            return self._finish(sequence, "abort", (token,), "", error=wrong)
        if token in params.stop_token_ids or (token in self._config.eos_token_ids and not params.ignore_eos):
            reason = "stop"
        elif sequence.detokenizer is not None:
            text, stopped = sequence.detokenizer.push(token)
            if stopped:
                return self._finish(sequence, "stop", (token,), text, flush=False)
        if reason is None and sequence.matcher is not None and sequence.matcher.complete:
            reason = "stop"
        if reason is None and len(sequence.answer) == sequence.limit:
            reason = "length"
        if reason is not None:
            return self._finish(sequence, reason, (token,), text)
        sequence.text.append(text)
        return Delta(
            request_id=sequence.request_id,
            text=text,
            token_ids=(token,),
            logprobs=None if logprob is None else (logprob,),
        )

    def _refuse(self, sequence: TokenSequence) -> Delta:
        """The model gave no finite logits: end this answer and say so, leave the others alone.

        What made them so may lie in what is cached, so nothing of that is used again.
        """
        self.prefixes.clear()
        self.image_cache.clear()
        return self._finish(sequence, "abort", (), "", error="the model gave no finite logits for this request")

    def _finish(
        self,
        sequence: TokenSequence,
        reason: FinishReason,
        tokens: tuple[int, ...],
        text: str,
        *,
        flush: bool = True,
        error: str | None = None,
    ) -> Delta:
        """The last delta of a request, everything it held given back; the next turn of a chat may go on from it."""
        if error is None and sequence.row is not None:
            self.prefixes.store(sequence, sequence.computed)
        if self._sequences.pop(sequence.request_id, None) is not None:
            self._scheduler.remove(sequence)
        if flush and sequence.detokenizer is not None:
            rest, stopped = sequence.detokenizer.finish()
            text, reason = text + rest, "stop" if stopped and reason != "abort" else reason
        sequence.text.append(text)
        return last_delta(sequence, reason, tokens, text, error)

    def _give_up(self, sequences: Sequence[TokenSequence], why: str) -> list[Delta]:
        """End those of them that have not ended, with an error."""
        over = [sequence for sequence in sequences if sequence.request_id in self._sequences]
        return [self._finish(sequence, "abort", (), "", flush=False, error=why) for sequence in over]
