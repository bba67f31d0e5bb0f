"""Engines on small random models, with memory that shows every mistake: small pages, NaN in fresh and returned ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from spyglass.config.cache import cache_plans
from spyglass.config.engine import EngineConfig
from spyglass.config.model import ModelConfig
from spyglass.engine.cache.allocator import CacheAllocator
from spyglass.engine.cache.prefix import PrefixCache
from spyglass.engine.drafts import Drafter
from spyglass.engine.engine import Engine
from spyglass.engine.request import RequestOutput, SamplingParams
from spyglass.engine.shares import Pace
from spyglass.engram.feed import EngramFeed
from spyglass.lora.use import NO_ADAPTER, AdapterHandle
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.tokens import Patches, Prompt
from spyglass.runtime.steps import ModelParts
from tests.small_models import random_text, small_config, small_model

PAGE_ROWS = {"window": 5, "pool4": 3, "state4": 2, "pool128": 1, "state128": 7}
PREFIX_BLOCK = 16  # tokens; no multiple of a page or of a compressed group of 128
NO_CACHES = {"prefix_cache_bytes": 0, "image_cache_bytes": 0}  # unless a test asks for them: what runs, is computed
MOST_PICTURE_TOKENS = 40  # of `engine_config`; a step must hold that many
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def engine_config(**changes: Any) -> ModelConfig:
    """The small model's config with small pictures, so that small steps are allowed."""
    return small_config(vision_max_n_token=MOST_PICTURE_TOKENS, **changes)


def make_model(seed: int = 0, **changes: Any) -> Any:
    """A small fp32 plain model and its config."""
    config = engine_config(**changes)
    return small_model(seed, config=config)


def make_engine(
    model: ModelParts,
    config: ModelConfig,
    *,
    cache_bytes: int | None = None,
    step: int = 64,
    token_bytes: Any = None,
    lookahead: int = 0,
    drafter: Drafter | None = None,
    page_rows: Mapping[str, int] = PAGE_ROWS,
    dtype: torch.dtype = torch.float32,
    banned: Sequence[int] = (0,),
    engram: EngramFeed | None = None,
    stored: bool = False,
    **options: Any,
) -> Engine:
    """An engine whose pages are tiny and poisoned; `step` is `max_step_tokens`, `token_bytes` what each id spells.

    `dtype` is the model's; `stored`: its rows lie in memory as codes.
    """
    settings = {"max_step_tokens": step, "step_milliseconds": 0, "max_sequences": 6, **NO_CACHES, **options}
    chosen = EngineConfig(**settings)
    blocks = CacheAllocator(
        cache_plans(config.text, lookahead, stored=stored),
        dtype=dtype,
        device=torch.device("cpu"),
        max_sequences=chosen.max_sequences,
        step_tokens=step,
        max_length=config.text.max_position_embeddings,
        cache_bytes=cache_bytes,
        page_rows=page_rows,
        fill=float("nan"),
    )
    prefixes = PrefixCache(blocks, chosen.prefix_cache_bytes or 0, PREFIX_BLOCK)
    return Engine(
        model,
        config,
        chosen,
        dtype=dtype,
        device=torch.device("cpu"),
        banned=banned,
        allocator=blocks,
        prefixes=prefixes,
        lookahead=lookahead,
        drafter=drafter,
        token_bytes=token_bytes,
        engram=engram,
    )


def patches(rows: int, columns: int, seed: int = 0, patch: int = 4) -> Patches:
    """A random picture that is already cut and normalised."""
    pixels = np.random.default_rng([seed, rows, columns]).normal(size=(rows * columns, 3, patch, patch))
    return Patches(pixels.astype(np.float32), (rows, columns))


def make_prompt(config: ModelConfig, parts: Sequence[int | tuple[int, int]], seed: int = 0) -> Prompt:
    """Runs of random text (a number of tokens) and random pictures (patch rows, columns), in order."""
    return prompt_from_parts(mixed_parts(parts, seed, config.text.vocab_size), config)


def mixed_parts(parts: Sequence[int | tuple[int, int]], seed: int = 0, vocab_size: int = 68) -> list[Any]:
    """The same before they are a prompt."""
    return [
        random_text(part, seed + number, vocab_size).tolist()
        if isinstance(part, int)
        else patches(*part, seed=seed + number)
        for number, part in enumerate(parts)
    ]


def run_all(
    engine: Engine, prompts: Sequence[Prompt], params: Sequence[SamplingParams] | SamplingParams = GREEDY
) -> list[RequestOutput]:
    """Outputs of requests that are added together, in their order."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    ids = [engine.add(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
    done: dict[int, RequestOutput] = {}
    while engine.has_work:
        for delta in engine.step():
            if delta.output is not None:
                done[delta.request_id] = delta.output
    return [done[i] for i in ids]


def logits_of(engine: Engine, prompt: Prompt, adapter: AdapterHandle = NO_ADAPTER) -> torch.Tensor:
    """Logits [T, V] of a prompt through the engine's loop."""
    out = torch.full((len(prompt), engine.vocab_size), float("nan"))
    engine.add(prompt, SamplingParams(max_tokens=0), sink=out, adapter=adapter)
    while engine.has_work:
        engine.step()
    return out


def pages_used(engine: Engine) -> dict[str, int]:
    """Pages that sequences hold, by group."""
    return {name: pool.num_used for name, pool in engine.allocator.pools.items()}


class Impatient(Pace):
    """Answers are due before each layer, and any prompt takes too long for them."""

    def __init__(self, target_s: float, slice_s: float | None = None) -> None:
        super().__init__(target_s, None if slice_s is None else 0.0)

    @property
    def cell_tokens(self) -> float:
        return 1.0

    def wait_s(self, answers_s: float) -> float | None:
        return self.slice_s

    def leaves_answers_out(self, tokens: float) -> bool:
        return self.slice_s is not None

    def prompt_tokens(self, *, alone: bool = False) -> int:
        return 200


class FailingModel:
    """The real model, which breaks in the steps that are named."""

    def __init__(self, model: Any, broken: set[int]) -> None:
        self._model, self._broken, self._step = model, broken, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def embed(self, batch: Any, rows: Any) -> torch.Tensor:
        self._step += 1
        if self._step in self._broken:
            raise RuntimeError("out of luck")
        out: torch.Tensor = self._model.embed(batch, rows)
        return out
