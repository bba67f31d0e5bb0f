"""Real adapters behind the prefix and picture caches: whatever is in a name, an answer is that of a cold run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spyglass.engine.engine import Engine
from spyglass.engine.request import RequestOutput, SamplingParams
from spyglass.lora.pool import AdapterPool
from spyglass.lora.use import NO_ADAPTER, AdapterHandle
from spyglass.prompt.tokens import Prompt
from tests.adapter_parts import Small, random_adapter, small
from tests.tolerance import LOGPROB_LAW

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)
CACHES = {"prefix_cache_bytes": 1 << 28, "image_cache_bytes": 1 << 28}


@pytest.fixture(scope="module", params=["v4", "v41"])
def world(request: pytest.FixtureRequest) -> Small:
    return small(request.param, seed=11)


def ask(engine: Engine, prompt: Prompt, use: AdapterHandle) -> RequestOutput:
    engine.add(prompt, PARAMS, adapter=use)
    while engine.has_work:
        for delta in engine.step():
            if delta.output is not None:
                output = delta.output
    return output


def same(warm: RequestOutput, cold: RequestOutput) -> bool:
    """Greedy ids are equal, and so are the log-probabilities of the first token."""
    assert warm.logprobs is not None and cold.logprobs is not None
    pairs = zip(warm.logprobs[0].top, cold.logprobs[0].top, strict=True)
    close = all(a == b and abs(x - y) < LOGPROB_LAW for (a, x), (b, y) in pairs)
    return close and warm.token_ids == cold.token_ids


def test_a_hit_never_crosses_adapters_factors_or_reloads(world: Small) -> None:
    """A, B, A at half its size, none, and another adapter under A's name: cold each time; A again: from the cache."""
    model = world.model()
    prompt = world.prompt([5, (4, 4), 40])
    files = {
        name: random_adapter(world.shapes, ["attention", "experts"], rank=4, seed=n) for n, name in enumerate("abc")
    }
    pool, engine = AdapterPool(model), world.engine(model, step=128, **CACHES)

    def cold(use: AdapterHandle) -> RequestOutput:
        return ask(world.engine(model, step=128), prompt, use)

    uses = [
        pool.attach("a", files["a"]),
        pool.attach("b", files["b"]),
        pool.attach("half a", files["a"], factor=0.5),
        NO_ADAPTER,
    ]
    answers = []
    for use in uses:
        answers.append(ask(engine, prompt, use))
        assert answers[-1].usage.cached_tokens == 0 and same(answers[-1], cold(use))
    assert not any(same(one, other) for n, one in enumerate(answers) for other in answers[:n])
    for use, answer in zip(uses, answers, strict=True):
        again = ask(engine, prompt, use)
        assert again.usage.cached_tokens > 0 and same(again, answer)
    pool.detach("a")
    new = pool.attach("a", files["c"])
    reloaded = ask(engine, prompt, new)
    assert reloaded.usage.cached_tokens == 0 and same(reloaded, cold(new)) and not same(reloaded, answers[0])


class Counting:
    """The model; `pictures` counts those that went through the tower."""

    def __init__(self, model: Any) -> None:
        self.inner, self.pictures = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def encode_images(self, images: Any) -> torch.Tensor:
        self.pictures += len(images.grids_I2)
        out: torch.Tensor = self.inner.encode_images(images)
        return out


def test_encoded_pictures_are_shared_among_adapters_that_do_not_touch_them(world: Small) -> None:
    """Adapters on the aligner each encode the picture, a reload under the same name too; those on the text do not."""
    model = Counting(world.model())
    prompt = world.prompt([5, (4, 4), 9])
    pool, engine = AdapterPool(model.inner), world.engine(model, step=128, image_cache_bytes=1 << 28)
    seeing = [random_adapter(world.shapes, ["aligner"], rank=2, seed=seed) for seed in (1, 2)]
    reading = random_adapter(world.shapes, ["attention"], rank=2, seed=3)
    counts, answers = [], []
    for name, adapter in (("see", seeing[0]), ("see", seeing[1]), ("read", reading), (None, None), ("see", seeing[0])):
        if name in pool.names:
            pool.detach(str(name))
        use = NO_ADAPTER if adapter is None else pool.attach(str(name), adapter)
        answers.append(ask(engine, prompt, use))
        counts.append(model.pictures)
        assert same(answers[-1], ask(world.engine(model.inner, step=128), prompt, use))
    assert counts == [1, 2, 3, 3, 3]
    assert not same(answers[0], answers[1]) and same(answers[4], answers[0])
