"""However 50 requests come, go and push one another out of memory, each gets what it gets alone (fp32, plain)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from spyglass.engine.engine import Engine
from spyglass.engine.request import RequestOutput, SamplingParams
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.tokens import Prompt
from tests import engine_parts, small_v41
from tests.engine_parts import NO_CACHES, make_model, pages_used, run_all
from tests.tolerance import LAW_OF_MAX

REQUESTS = 50
STOPS = [[3], [], [], [11, 5]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model, engines over it, and bytes that hold about two of the longest requests."""

    model: Callable[[], Any]
    engine: Callable[..., Engine]
    cache_bytes: int


@dataclass(frozen=True, kw_only=True)
class World:
    """Requests of a family, and what each gets alone."""

    family: Family
    model: Any
    requests: list[tuple[Prompt, SamplingParams]]
    alone: list[RequestOutput]


def v4_engine(model: Any, **options: Any) -> Engine:
    return engine_parts.make_engine(model, model.config, **options)


FAMILIES = {
    "v4": Family(model=lambda: make_model(seed=3), engine=v4_engine, cache_bytes=632_000),
    "v41": Family(model=lambda: small_v41.small_v41_model(seed=3), engine=small_v41.make_engine, cache_bytes=322_000),
}


def random_parts(random: np.random.Generator) -> list[int | tuple[int, int]]:
    """Text, a picture between text, or two pictures side by side."""
    text = [int(n) for n in random.integers(1, 30, 2)]
    grids = [(int(rows), int(columns)) for rows, columns in random.integers(1, 7, (2, 2))]
    return [[text[0]], [text[0], grids[0], text[1]], [*grids, text[0]]][int(random.integers(0, 3))]


def random_params(random: np.random.Generator, number: int) -> SamplingParams:
    """Every second one greedy; some with penalties, log-probabilities and stop ids."""
    return SamplingParams(
        temperature=float(number % 2) * 0.8,
        seed=number,
        top_p=float(random.choice([1.0, 0.9])),
        max_tokens=int(random.choice([0, 1, 6, 16, 32])),
        ignore_eos=number % 5 > 0,
        stop_token_ids=STOPS[number % 4],
        logprobs=[None, 2][number % 2],
        prompt_logprobs=[None, None, 1][number % 3],
        repetition_penalty=float(random.choice([1.0, 1.3])),
        frequency_penalty=float(random.choice([0.0, 0.5])),
    )


def play(
    engine: Engine, requests: list[tuple[Prompt, SamplingParams]], random: np.random.Generator
) -> dict[int, RequestOutput]:
    """All requests, arriving a few at a time; every tenth or so is cancelled somewhere on the way."""
    numbers: dict[int, int] = {}
    done: dict[int, RequestOutput] = {}
    todo = list(enumerate(requests))
    while todo or engine.has_work:
        for number, (prompt, params) in todo[: int(random.integers(0, 4))]:
            numbers[engine.add(prompt, params)] = number
            todo.pop(0)
        for delta in engine.step():
            if delta.output is not None:
                done[numbers[delta.request_id]] = delta.output
        live = [request for request, number in numbers.items() if number not in done]
        if live and random.random() < 0.1:
            last = engine.abort(int(random.choice(live)))
            assert last is not None and last.output is not None
            done[numbers[last.request_id]] = last.output
    return done


def assert_as_alone(output: RequestOutput, alone: RequestOutput) -> None:
    if output.finish_reason == "abort":
        assert output.error is None
        assert output.token_ids == alone.token_ids[: len(output.token_ids)]
        return
    assert (output.token_ids, output.finish_reason) == (alone.token_ids, alone.finish_reason)
    for ours, theirs in ((output.logprobs, alone.logprobs), (output.prompt_logprobs, alone.prompt_logprobs)):
        values = [[e.logprob for e in entries or () if e is not None] for entries in (ours, theirs)]
        np.testing.assert_allclose(*values, atol=30 * LAW_OF_MAX)


def make_world(family: Family, requests: int) -> World:
    """Requests, a third of them with the prompt of an earlier one, and what each gets alone without caches."""
    model = family.model()
    random = np.random.default_rng(7)
    shapes = [random_parts(random) for _ in range(requests)]
    first = [number - 1 if number % 3 == 1 else number for number in range(requests)]
    asked = [
        (
            prompt_from_parts(engine_parts.mixed_parts(shapes[first[number]], seed=first[number]), model.config),
            random_params(random, number),
        )
        for number in range(requests)
    ]
    quiet = family.engine(model, step=512)
    alone = [run_all(quiet, [prompt], params)[0] for prompt, params in asked]
    return World(family=family, model=model, requests=asked, alone=alone)


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest) -> World:
    return make_world(FAMILIES[request.param], REQUESTS)


@pytest.mark.parametrize("caches", [NO_CACHES, {"prefix_cache_bytes": 1_000_000, "image_cache_bytes": 10_000}], ids=str)
def test_any_interleaving_of_50_requests_gives_each_what_it_gets_alone(
    caches: dict[str, int], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With caches or without, and with caches that give way to requests for lack of memory."""
    monkeypatch.setattr("spyglass.engine.scheduler.GROWTH", 0)  # memory runs out in the middle of answers
    engine = world.family.engine(world.model, step=43, cache_bytes=world.family.cache_bytes, **caches)
    done = play(engine, world.requests, np.random.default_rng(8))
    assert sorted(done) == list(range(REQUESTS))
    assert engine.stats().preemptions >= 3
    assert sum(output.finish_reason == "abort" for output in done.values()) >= 3
    found = engine.stats().prefix_hits, engine.stats().image_hits, engine.prefixes.counts.evictions
    assert all(found) if caches is not NO_CACHES else not any(found)
    engine.prefixes.clear()
    assert set(pages_used(engine).values()) == {0}
    for number, alone in enumerate(world.alone):
        assert_as_alone(done[number], alone)
