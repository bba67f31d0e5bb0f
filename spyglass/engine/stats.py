"""What an engine can tell about itself, for metrics and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges of now, and counters since the engine was made.

    `cache_share` pages that requests hold of the fullest pool of rows, 0 to 1. `prompt_tokens` of requests taken,
    `computed_tokens` run through the model (more after preemptions, fewer after cache hits). `*_queries` and `*_hits`
    count tokens that were looked up in the prefix cache, and images in the image cache; `*_evictions` what had to go
    from them, `*_bytes` what they hold now. `waiting` requests have no memory (yet, or any more).
    `step_seconds` is the time in `step`, `sampling_seconds` the part of it from logits to token ids.
    `mask_share` is the part of the time for grammar masks that went by during forward passes; 0 without any.
    """

    running: int = 0
    waiting: int = 0
    cache_share: float = 0.0
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    image_queries: int = 0
    image_hits: int = 0
    prefix_evictions: int = 0
    image_evictions: int = 0
    prefix_bytes: int = 0
    image_bytes: int = 0
    step_seconds: float = 0.0
    sampling_seconds: float = 0.0
    mask_share: float = 0.0


@dataclass(slots=True)
class Counters:
    """What an engine counts step by step; the fields are those of `EngineStats`."""

    steps: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    step_seconds: float = 0.0
    sampling_seconds: float = 0.0
