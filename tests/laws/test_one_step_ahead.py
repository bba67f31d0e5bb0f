"""A step that starts before the tokens of the last one are read gives what steps one by one give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from spyglass.engine.request import SamplingParams
from tests.engine_parts import (
    GREEDY,
    NO_CACHES,
    FailingModel,
    make_engine,
    make_model,
    make_prompt,
    pages_used,
    run_all,
)
from tests.laws.test_interleavings import FAMILIES, Family, World, assert_as_alone, make_world, play

CACHES = {"prefix_cache_bytes": 1_000_000, "image_cache_bytes": 10_000}


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest) -> World:
    return make_world(FAMILIES[request.param], requests=24)


@pytest.mark.parametrize("caches", [NO_CACHES, CACHES], ids=["cold", "cached"])
def test_one_step_ahead_gives_each_request_what_it_gets_alone(
    caches: dict[str, int], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With penalties, stop ids, log-probabilities, images, preemptions and cancelled requests."""
    monkeypatch.setattr("spyglass.engine.scheduler.GROWTH", 0)  # memory runs out in the middle of answers
    family: Family = world.family
    engine = family.engine(world.model, step=43, cache_bytes=family.cache_bytes, async_scheduling="on", **caches)
    done = play(engine, world.requests, np.random.default_rng(8))
    assert sorted(done) == list(range(len(world.requests)))
    assert engine.stats().preemptions >= 1
    engine.prefixes.clear()
    assert set(pages_used(engine).values()) == {0}
    for number, alone in enumerate(world.alone):
        assert_as_alone(done[number], alone)


class Order:
    """A model that notes what is asked of it."""

    def __init__(self, model: Any) -> None:
        self._model, self.calls = model, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def embed(self, batch: Any, rows: Any) -> torch.Tensor:
        self.calls.append("run")
        out: torch.Tensor = self._model.embed(batch, rows)
        return out

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self.calls.append("sample")
        out: torch.Tensor = self._model.logits(hidden, rows)
        return out


def deltas_of(engine: Any, order: Order) -> Iterator[int]:
    while engine.has_work:
        before = len(order.calls)
        count = len(engine.step())
        order.calls += ["told"] * count
        assert len(order.calls) > before
        yield count


def test_a_step_is_started_before_the_tokens_of_the_last_one_are_told() -> None:
    model = make_model(seed=3)
    order = Order(model)
    engine = make_engine(order, model.config, async_scheduling="on")
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=0)
    engine.add(make_prompt(model.config, [7]), params)
    counts = list(deltas_of(engine, order))
    assert counts == [0, 1, 1, 1, 1, 1]
    assert order.calls == ["run", "sample", *["run", "sample", "told"] * 4, "told"], "and none runs for nothing"


def test_an_answer_that_ends_costs_one_row_and_no_page_stays_held() -> None:
    model = make_model(seed=3)
    prompt = make_prompt(model.config, [9])
    [whole] = run_all(make_engine(model, model.config), [prompt], SamplingParams(temperature=0, max_tokens=6))
    stop = SamplingParams(temperature=0, max_tokens=6, stop_token_ids=whole.token_ids[2:3])
    outputs, computed = [], []
    for mode in ("off", "on"):
        engine = make_engine(model, model.config, async_scheduling=mode)
        outputs += run_all(engine, [prompt], stop)
        computed.append(engine.stats().computed_tokens)
        assert set(pages_used(engine).values()) == {0}
    assert (
        outputs[0].token_ids == outputs[1].token_ids and outputs[0].finish_reason == outputs[1].finish_reason == "stop"
    )
    assert computed[1] == computed[0] + 1


def test_a_failing_step_costs_its_requests_what_is_not_drawn_yet() -> None:
    model = make_model(seed=3)
    prompts = [make_prompt(model.config, [7 + n]) for n in range(2)]
    alone = run_all(make_engine(model, model.config), prompts)
    engine = make_engine(FailingModel(model, {5}), model.config, async_scheduling="on")
    ids = [engine.add(prompt, GREEDY) for prompt in prompts]
    outputs: dict[int, Any] = {}
    failed = 0
    while engine.has_work:
        try:
            outputs |= {delta.request_id: delta.output for delta in engine.step() if delta.output is not None}
        except RuntimeError:
            failed += 1
    assert failed == 1
    for request, expected in zip(ids, alone, strict=True):
        assert outputs[request].error and outputs[request].token_ids == expected.token_ids[:4]
    assert run_all(engine, prompts)[0].token_ids == alone[0].token_ids
    assert set(pages_used(engine).values()) == {0}
