"""A step with long prompts lets the answers of others go on between its layers; what comes out is the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from spyglass.engine.engine import Engine
from spyglass.engine.request import Delta, RequestOutput
from spyglass.engine.scheduler import Scheduler
from spyglass.engine.sequence import Chunk
from spyglass.engine.shares import Client, Pace, RecentUse
from tests.cache_parts import BOTH_CACHES, SHOWN, World, finish, make_world, picture, text
from tests.engine_parts import NO_CACHES, Impatient, pages_used

ANSWER = replace(SHOWN, max_tokens=20)


class Broken:
    """A model that fails in steps of answers alone while `fails` is set, in any while `fails_always` is; `watch` sees
    what is embedded."""

    def __init__(self, model: Any) -> None:
        self._model, self.fails, self.fails_always = model, False, False
        self.watch: Callable[[Any], None] = lambda batch: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def embed(self, batch: Any, rows: Any) -> torch.Tensor:
        self.watch(batch)
        if self.fails and (self.fails_always or len(batch.ids_T) == len(batch.logit_rows_R)):
            raise RuntimeError("broken on purpose")
        out: torch.Tensor = self._model.embed(batch, rows)
        return out


@pytest.fixture(scope="module", params=["v4", "v41"])
def world(request: pytest.FixtureRequest) -> World:
    return make_world(request.param)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spyglass.engine.shares.Pace", Impatient)


def with_answers(engine: Engine, world: World) -> list[int]:
    """Two answers under way in an engine."""
    answers = [engine.add(world.prompt([text(5, seed)]), ANSWER) for seed in range(2)]
    while not all(engine.sequences[request].answer.token_ids for request in answers):
        engine.step()
    return answers


def make_engine(world: World, **options: Any) -> Engine:
    return world.engine(step=300, step_milliseconds=1, **options)


@pytest.mark.parametrize("caches", [NO_CACHES, BOTH_CACHES])
def test_answers_are_those_of_steps_that_run_to_their_end(caches: dict[str, int], world: World) -> None:
    shapes: list[list[Any]] = [
        [text(9, 1)],
        [text(3, 2), picture(6, 6, 1), text(60, 3)],
        [text(140, 4)],
        [picture(6, 4, 2), text(90, 5)],
        [text(2, 6)],
    ]
    prompts = [world.prompt(parts) for parts in shapes]
    engine, rounds = make_engine(world, **caches), 0
    early: list[Delta] = []
    done: dict[int, RequestOutput] = {}
    ids = []
    while prompts or engine.has_work:  # they come one after the other, so that there are answers meanwhile
        if prompts:
            ids.append((engine.add(prompts[0], ANSWER), prompts.pop(0)))
        early.clear()
        late = engine.step(early.extend)
        done |= {delta.request_id: delta.output for delta in [*early, *late] if delta.output is not None}
        rounds += bool(early)
    for request, prompt in ids:
        world.check(done[request], prompt, ANSWER)
    assert rounds > 2
    engine.prefixes.clear()
    assert set(pages_used(engine).values()) == {0}


def test_each_layer_of_a_long_step_lets_answers_go_on(world: World) -> None:
    engine = make_engine(world)
    answers = with_answers(engine, world)
    prompt = engine.add(world.prompt([text(50, 3)]), ANSWER)
    early: list[Delta] = []
    late = engine.step(early.extend)
    rounds = 1 + world.model.config.text.num_hidden_layers  # one before the first
    assert [delta.request_id for delta in late] == [prompt]
    assert sorted(delta.request_id for delta in early) == sorted(answers * rounds)


def test_answers_go_on_while_an_image_is_in_the_tower(world: World) -> None:
    engine = make_engine(world)
    with_answers(engine, world)
    engine.add(world.prompt([picture(6, 6, 1), text(3, 1)]), ANSWER)
    early: list[Delta] = []
    engine.step(early.extend)
    config = world.model.config
    assert len(early) == 2 * (1 + config.vision.num_hidden_layers + config.text.num_hidden_layers)


def test_what_nobody_takes_at_once_comes_with_the_rest_in_order(world: World) -> None:
    engine = make_engine(world)
    answers = with_answers(engine, world)
    sequences = {request: engine.sequences[request] for request in answers}
    told = {request: list(sequence.answer.token_ids) for request, sequence in sequences.items()}
    engine.add(world.prompt([text(50, 3)]), ANSWER)
    for delta in engine.step():
        told.setdefault(delta.request_id, []).extend(delta.token_ids)
    for request, sequence in sequences.items():
        assert told[request] == sequence.answer.token_ids and len(told[request]) > 5


def test_a_step_between_layers_that_fails_ends_its_own_requests_alone(world: World) -> None:
    model = Broken(world.model)
    engine = world.build(model, step=300, step_milliseconds=1, **NO_CACHES)
    answers = with_answers(engine, world)
    prompt = world.prompt([text(50, 3)])
    number = engine.add(prompt, ANSWER)
    model.fails = True
    with pytest.raises(RuntimeError, match="broken on purpose"):
        engine.step()
    model.fails = False
    done: dict[int, RequestOutput] = {}
    while engine.has_work:
        done |= {delta.request_id: delta.output for delta in engine.step() if delta.output is not None}
    assert {request for request, output in done.items() if output.error} == set(answers)
    world.check(done[number], prompt, ANSWER)
    assert set(pages_used(engine).values()) == {0}


def test_an_error_between_layers_is_not_told_to_a_later_step_if_the_step_around_it_failed_too(world: World) -> None:
    model = Broken(world.model)
    engine = world.build(model, step=300, step_milliseconds=1, **NO_CACHES)
    with_answers(engine, world)
    engine.add(world.prompt([text(50, 3)]), ANSWER)
    model.fails = model.fails_always = True
    with pytest.raises(RuntimeError, match="broken on purpose"):
        engine.step()
    model.fails = model.fails_always = False
    while engine.has_work:
        engine.step()
    prompt = world.prompt([text(9, 4)])
    world.check(finish(engine, [engine.add(prompt, ANSWER)])[0], prompt, ANSWER)


@pytest.mark.parametrize("takes", [True, False])
def test_tokens_are_counted_once_whoever_takes_them(takes: bool, world: World) -> None:
    engine = make_engine(world)
    before = engine.stats().generated_tokens
    answers = with_answers(engine, world)
    answers.append(engine.add(world.prompt([text(50, 3)]), ANSWER))
    while engine.has_work:
        engine.step((lambda deltas: None) if takes else None)
    assert engine.stats().generated_tokens - before == len(answers) * ANSWER.max_tokens


def test_a_step_between_layers_does_not_shorten_the_memory_of_who_used_what(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    whole = RecentUse.count

    def count(use: RecentUse, tokens: Mapping[Client, int]) -> None:
        counted.append(sum(tokens.values()))
        whole(use, tokens)

    engine = make_engine(world)
    answers = with_answers(engine, world)
    engine.add(world.prompt([text(50, 3)]), ANSWER)
    monkeypatch.setattr(RecentUse, "count", count)
    engine.step()
    engine.step()
    rounds = 1 + world.model.config.text.num_hidden_layers
    assert counted == [50, rounds * len(answers) + 3]


def test_prompts_have_two_thirds_of_the_time_where_a_step_of_answers_takes_long(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a step of answers takes 9 s and that of a prompt 1 s."""
    monkeypatch.setattr(Impatient, "wait_s", Pace.wait_s)
    now = [0.0]
    model = Broken(world.model)
    engine = world.build(model, step=300, step_milliseconds=1, **NO_CACHES)
    with_answers(engine, world)
    engine.step_runner.capture.backend = "eager"  # else nothing is embedded, and the clock stands still
    monkeypatch.setattr("spyglass.engine.loop.time.perf_counter", lambda: now[0])

    def tick(batch: Any) -> None:
        now[0] += 9.0 if len(batch.ids_T) == len(batch.logit_rows_R) else 1.0

    model.watch = tick
    engine.add(world.prompt([text(50, 3)]), ANSWER)
    early: list[Delta] = []
    engine.step(early.extend)
    assert len(early) == 2, "one step before the first layer; the others are not due for 18 s"


def test_nobody_gives_way_between_layers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers for which there is no memory wait for the end of the step."""
    engine = make_engine(world)
    answers = with_answers(engine, world)
    whole = Scheduler.answers

    def without_memory(scheduler: Scheduler, running: Collection[int]) -> list[Chunk]:
        with monkeypatch.context() as patch:
            patch.setattr(scheduler.allocator, "reserve", lambda rows, tokens: False)
            return whole(scheduler, running)

    engine.add(world.prompt([text(50, 3)]), ANSWER)
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "answers", without_memory)
        early: list[Delta] = []
        engine.step(early.extend)
    assert not early and engine.stats().preemptions == 0
    outputs = finish(engine, answers)
    for seed, output in enumerate(outputs):
        world.check(output, world.prompt([text(5, seed)]), ANSWER)
