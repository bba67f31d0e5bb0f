"""What the laws of the caches share: models with engines over them, and answers of runs without caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from spyglass.batch.types import ImageBatch
from spyglass.engine.engine import Engine
from spyglass.engine.request import RequestOutput, SamplingParams
from spyglass.lora.use import NO_ADAPTER, AdapterHandle
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.tokens import Patches, Prompt
from tests import engine_parts, small_v41
from tests.engine_parts import NO_CACHES, make_model, patches
from tests.small_models import random_text
from tests.tolerance import assert_law

BOTH_CACHES = {"prefix_cache_bytes": 1 << 30, "image_cache_bytes": 1 << 30}
VOCABULARY = 70
# every logit of each answer token is compared, not only the best one
SHOWN = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=VOCABULARY)
BRIEF = replace(SHOWN, max_tokens=2)


class CountedModel:
    """The same model; `pictures` counts those that went through the tower, `rows` the tokens of all steps."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.pictures = self.rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode_images(self, images: ImageBatch) -> torch.Tensor:
        self.pictures += len(images.grids_I2)
        out: torch.Tensor = self._model.encode_images(images)
        return out

    def embed(self, batch: Any, rows: Any) -> torch.Tensor:
        self.rows += len(batch.ids_T)
        out: torch.Tensor = self._model.embed(batch, rows)
        return out


@dataclass(frozen=True, kw_only=True)
class World:
    """A model, engines over it, and answers of an engine without caches to compare with."""

    model: Any = field(repr=False)
    build: Callable[..., Engine]
    plain: Engine = field(repr=False)  # without caches
    cold: dict[bytes, RequestOutput] = field(default_factory=dict, repr=False)

    def engine(self, **options: Any) -> Engine:
        return self.build(self.model, **{"step": 64, **options})

    def prompt(self, parts: Sequence[Any]) -> Prompt:
        return prompt_from_parts(list(parts), self.model.config)

    def check(self, output: RequestOutput, prompt: Prompt, params: SamplingParams = SHOWN) -> None:
        """An answer equals that of a run without caches: ids, and the log-probability of every token beside them."""
        key = prompt.ids_T.tobytes() + prompt.kinds_T.tobytes() + b"".join(prompt.digests) + repr(params).encode()
        if key not in self.cold:
            self.cold[key] = ask(self.plain, prompt, params)
        cold = self.cold[key]
        assert output.token_ids == cold.token_ids
        assert_law(spread(output), spread(cold))


def v4_engine(model: Any, **options: Any) -> Engine:
    return engine_parts.make_engine(model, model.config, **options)


def make_world(family: str) -> World:
    """The small model of V4 or V4.1."""
    if family == "v4":
        model, build = make_model(seed=3), v4_engine
    else:
        model, build = small_v41.small_v41_model(seed=3), small_v41.make_engine
    return World(model=model, build=build, plain=build(model, step=200, **NO_CACHES))


def spread(output: RequestOutput) -> np.ndarray[Any, Any]:
    """Log-probabilities [answer, V] by id."""
    assert output.logprobs is not None
    return np.array([[value for _, value in sorted(entry.top)] for entry in output.logprobs])


def ask(
    engine: Engine, prompt: Prompt, params: SamplingParams = SHOWN, adapter: AdapterHandle = NO_ADAPTER
) -> RequestOutput:
    return finish(engine, [engine.add(prompt, params, adapter=adapter)])[0]


def finish(engine: Engine, ids: Sequence[int]) -> list[RequestOutput]:
    done: dict[int, RequestOutput] = {}
    while engine.has_work:
        for delta in engine.step():
            if delta.output is not None:
                done[delta.request_id] = delta.output
    return [done[request] for request in ids]


def text(length: int, seed: int) -> list[int]:
    """Ids that no model here bans or treats as a picture."""
    return random_text(length, seed, 68).tolist()


def picture(rows: int, columns: int, seed: int) -> Patches:
    return patches(rows, columns, seed=seed)


MIXED: list[Any] = [text(21, 1), picture(4, 4, 2), text(5, 3), picture(6, 6, 4), picture(3, 5, 5), text(30, 6)]
