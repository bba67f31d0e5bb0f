"""Caches that are too small, must give way, must not be asked, or have seen a fault: no answer changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from spyglass.engine.request import SamplingParams
from tests import engine_parts
from tests.cache_parts import BOTH_CACHES, BRIEF, MIXED, SHOWN, World, ask, finish, make_world, picture, text
from tests.engine_parts import NO_CACHES, pages_used
from tests.tolerance import assert_law


@pytest.fixture(scope="module", params=["v4", "v41"])
def world(request: pytest.FixtureRequest) -> World:
    return make_world(request.param)


def test_a_preempted_request_goes_on_from_what_the_cache_still_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spyglass.engine.scheduler.GROWTH", 0)  # memory runs out in the middle of answers
    world = make_world("v4")
    params = replace(SHOWN, max_tokens=30)
    prompts = [world.prompt([text(140, number)]) for number in (1, 2)]
    computed = []
    for options in (NO_CACHES, BOTH_CACHES):
        engine = world.engine(cache_bytes=460_000, max_sequences=3, max_length=400, **options)
        outputs = finish(engine, [engine.add(prompt, params) for prompt in prompts])
        for output, prompt in zip(outputs, prompts, strict=True):
            world.check(output, prompt, params)
            assert output.usage.cached_tokens == 0  # what a request computed itself is no gift
        assert engine.stats().preemptions > 0
        computed.append(engine.stats().computed_tokens)
    once = sum(len(prompt) + params.max_tokens - 1 for prompt in prompts)
    assert computed[0] > computed[1] == once


@pytest.mark.parametrize("kept", [1, 40_000, 150_000, 400_000])
def test_a_small_cache_holds_no_more_than_it_may_and_changes_no_answer(kept: int, world: World) -> None:
    engine = world.engine(prefix_cache_bytes=kept, image_cache_bytes=3000)
    for number in (1, 2, 1, 3, 1, 1):
        prompt = world.prompt([text(20, number), picture(4, 4, number), text(50, number)])
        output = ask(engine, prompt, BRIEF)
        world.check(output, prompt, BRIEF)
        assert engine.prefixes.counts.bytes_held <= kept
        assert engine.image_cache.counts.bytes_held <= 3000
    if kept == 1:
        assert len(engine.prefixes) == 0
        assert set(pages_used(engine).values()) == {0}
    engine.prefixes.clear()
    assert engine.prefixes.counts.bytes_held == 0
    assert set(pages_used(engine).values()) == {0}


def test_a_request_whose_pictures_exceed_the_cache_still_runs(world: World) -> None:
    engine = world.engine(step=40, image_cache_bytes=100, prefix_cache_bytes=0)
    prompt = world.prompt(MIXED)
    world.check(ask(engine, prompt), prompt)
    assert len(engine.image_cache) == 0


def test_whoever_asks_for_the_logits_of_a_prompt_gets_them_all(world: World) -> None:
    engine = world.engine(step=50, **BOTH_CACHES)
    prompt = world.prompt(MIXED)
    ask(engine, prompt)
    cold = engine_parts.logits_of(world.plain, prompt)
    assert_law(engine_parts.logits_of(engine, prompt), cold)
    output = ask(engine, prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.usage.cached_tokens == 0
    assert output.prompt_logprobs is not None
    missing = [t for t, entry in enumerate(output.prompt_logprobs) if entry is None]
    assert missing == [t for t in range(len(prompt)) if t == 0 or prompt.kinds_T[t] >= 0]


class BrokenOnce:
    """A model whose rows hold NaN in one step."""

    def __init__(self, model: Any) -> None:
        self._model, self.broken = model, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def embed(self, batch: Any, rows: Any) -> torch.Tensor:
        out: torch.Tensor = self._model.embed(batch, rows)
        return out * float("nan") if self.broken else out


def test_what_was_computed_beside_a_fault_of_the_model_is_not_used_again(world: World) -> None:
    broken = BrokenOnce(world.model)
    engine = replace(world, model=broken).engine(**BOTH_CACHES)
    prompt = world.prompt([text(20, 1), picture(4, 4, 1), text(9, 2)])
    broken.broken = True
    assert ask(engine, prompt).error is not None
    assert len(engine.prefixes) == len(engine.image_cache) == 0
    broken.broken = False
    output = ask(engine, prompt)
    world.check(output, prompt)
    assert output.usage.cached_tokens == 0
