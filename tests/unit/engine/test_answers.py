"""How answers end and what they are drawn from, on models whose logits are written down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from spyglass.config.engine import EngineConfig
from spyglass.engine.engine import Engine
from spyglass.engine.request import SamplingParams
from spyglass.prompt.build import prompt_from_parts
from tests.engine_parts import (
    GREEDY,
    engine_config,
    logits_of,
    make_engine,
    make_model,
    make_prompt,
    run_all,
)

EOS = 1


class ScriptedModel:
    """A model that always puts all weight on the next id of a script, whatever it is asked."""

    def __init__(self, script: list[int], vocab: int = 70) -> None:
        self._script, self._vocab, self._place = script, vocab, 0

    def encode_images(self, images: Any) -> torch.Tensor:
        raise AssertionError("no pictures here")

    def embed(self, batch: Any, image_rows_IC: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(len(batch.ids_T), 1, 1)

    def text(self, streams_TMC: torch.Tensor, batch: Any, cache: Any) -> tuple[torch.Tensor, Any]:
        return streams_TMC[:, 0], None

    def argmax(self, hidden_TC: torch.Tensor, rows_R: torch.Tensor, banned_V: torch.Tensor) -> None:
        return None

    def logits(self, hidden_TC: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(rows_R), self._vocab)
        out[:, self._script[self._place]] = 30.0
        self._place += 1
        return out


def scripted(script: list[int]) -> Engine:
    return make_engine(ScriptedModel(script), engine_config())


def one(engine: Engine, **params: Any) -> Any:
    [output] = run_all(engine, [make_prompt(engine_config(), [3])], SamplingParams(**params))
    return output


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(seed=1)


def test_an_answer_ends_at_end_of_text_and_keeps_that_id() -> None:
    output = one(scripted([5, 6, EOS, 7]))
    assert (output.token_ids, output.finish_reason) == ((5, 6, EOS), "stop")


def test_ignore_eos_goes_on() -> None:
    output = one(scripted([5, EOS, 7, 8]), ignore_eos=True, max_tokens=4)
    assert (output.token_ids, output.finish_reason) == ((5, EOS, 7, 8), "length")


def test_an_answer_ends_at_a_stop_id() -> None:
    output = one(scripted([5, 9, 7, 8]), stop_token_ids=[9])
    assert (output.token_ids, output.finish_reason) == ((5, 9), "stop")


def test_an_answer_ends_at_max_tokens() -> None:
    output = one(scripted([5, 6, 7]), max_tokens=2)
    assert (output.token_ids, output.finish_reason) == ((5, 6), "length")


def test_without_max_tokens_an_answer_ends_at_the_models_limit() -> None:
    config = engine_config()
    limit = config.text.max_position_embeddings
    assert make_engine(ScriptedModel([]), config).max_length == limit
    assert make_engine(ScriptedModel([]), config, max_length=limit).max_length == limit
    for most in (None, 15):
        output = one(make_engine(ScriptedModel([5] * 20), config, max_length=10), max_tokens=most)
        assert (len(output.token_ids), output.finish_reason) == (7, "length")
        assert output.prompt_logprobs is None and output.logprobs is None


def test_without_max_tokens_an_answer_ends_where_the_memory_does() -> None:
    engine = make_engine(ScriptedModel([5] * 4000), engine_config(), cache_bytes=400_000, max_sequences=2)
    most = engine.allocator.max_tokens_alone
    assert most is not None and 3 < most < engine.max_length
    output = one(engine, max_tokens=None)
    assert (len(output.token_ids), output.finish_reason) == (most - 3, "length")


def test_max_tokens_0_only_runs_the_prompt(model: Any) -> None:
    [output] = run_all(make_engine(model, model.config), [make_prompt(model.config, [9])], SamplingParams(max_tokens=0))
    assert (output.token_ids, output.finish_reason) == ((), "length")


def test_counters_tell_what_was_asked_computed_and_drawn(model: Any) -> None:
    """The prompt of 50 takes two steps; a request without an answer ends without a token."""
    engine = make_engine(model, model.config, step=40)
    for length, most in ((50, 3), (9, 3), (4, 0)):
        engine.add(make_prompt(model.config, [length]), replace(GREEDY, max_tokens=most))
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.computed_tokens) == (63, 6, 63 + 4)


class ConstantModel(ScriptedModel):
    """The same logits at every position: 3.0 for id 5, 2.6 for 6, 2.2 for 7, 0 for the rest."""

    def logits(self, hidden_TC: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(rows_R), self._vocab)
        out[:, [5, 6, 7]] = torch.tensor([3.0, 2.6, 2.2])
        return out


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [
        ({}, (5, 5, 5, 5)),
        ({"presence_penalty": 0.5}, (5, 6, 5, 5)),  # 5 at 2.5 falls behind 6; then 6 at 2.1 behind 5
        ({"frequency_penalty": 0.5}, (5, 6, 5, 7)),  # after two fives, 5 stands at 2.0, 6 at 2.1
        ({"repetition_penalty": 1.3}, (6, 5, 5, 5)),  # the prompt's 5 counts from the start: 2.31; then 6 at 2.0
    ],
)
def test_penalties_see_prompt_and_answer(penalty: dict[str, float], expected: tuple[int, ...]) -> None:
    engine = make_engine(ConstantModel([]), engine_config())
    prompt = prompt_from_parts([[5, 9]], engine_config())
    [output] = run_all(engine, [prompt], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, **penalty))
    assert output.token_ids == expected


def test_banned_ids_are_never_drawn_but_end_of_text_may_be() -> None:
    """A config may give the end-of-text id as pad too, and ids beyond the vocabulary as picture roles."""
    for script, drawn in (([0], False), ([EOS], True)):
        engine = Engine(
            ScriptedModel(script),
            engine_config(),
            EngineConfig(max_step_tokens=64, step_milliseconds=0),
            dtype=torch.float32,
            device=torch.device("cpu"),
            banned=[0, EOS, 10**6],
        )
        assert (one(engine, max_tokens=1, temperature=0).token_ids == tuple(script)) == drawn


def test_deltas_add_up_to_the_output(model: Any) -> None:
    engine = make_engine(model, model.config)
    request = engine.add(make_prompt(model.config, [12]), replace(GREEDY, logprobs=1))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert {delta.request_id for delta in deltas} == {request}
    output = deltas[-1].output
    assert output is not None
    assert sum((delta.token_ids for delta in deltas), ()) == output.token_ids
    assert sum((delta.logprobs or () for delta in deltas), ()) == output.logprobs
    assert [delta.finish_reason for delta in deltas] == [None] * 7 + ["length"]


def test_prompt_logprobs_are_those_of_the_logits_in_any_chunking(model: Any) -> None:
    prompt = make_prompt(model.config, [20, (3, 3), 30])
    logits = logits_of(make_engine(model, model.config, step=400), prompt).log_softmax(-1)
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    for step in (40, 400):
        [output] = run_all(make_engine(model, model.config, step=step), [prompt], params)
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for place, entry in enumerate(output.prompt_logprobs[1:], 1):
            assert (entry is None) == (prompt.ids_T[place] < 0)
            if entry is not None:
                assert entry.token_id == prompt.ids_T[place]
                assert entry.logprob == pytest.approx(float(logits[place - 1, entry.token_id]), abs=1e-4)
                assert entry.top[0][1] == pytest.approx(float(logits[place - 1].max()), abs=1e-4)


def test_seeds_differ_when_none_is_given(model: Any) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompt = make_prompt(model.config, [5])
    first, second = run_all(make_engine(model, model.config), [prompt, prompt], params)
    assert first.token_ids != second.token_ids
    seeded = replace(params, seed=5)
    first, second = run_all(make_engine(model, model.config), [prompt, prompt], seeded)
    assert first.token_ids == second.token_ids


def test_positions_shift_what_is_drawn(model: Any) -> None:
    """A constant distribution must not give a constant answer."""

    class Flat(ScriptedModel):
        def logits(self, hidden_TC: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(rows_R), 70)

    output = one(make_engine(Flat([]), engine_config()), seed=3, max_tokens=200, ignore_eos=True)
    assert len(set(output.token_ids)) > 50
    assert np.bincount(output.token_ids, minlength=70)[0] == 0
