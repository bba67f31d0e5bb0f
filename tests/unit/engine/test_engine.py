"""The step loop: how answers end, what is refused, and that one request's trouble stays its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from spyglass.config.engine import EngineConfig
from spyglass.engine.engine import Engine
from spyglass.engine.request import SamplingParams
from spyglass.errors import CapacityError, ConfigError, PromptError
from spyglass.ops.table import Ops, bind_ops
from spyglass.prompt.build import prompt_from_parts
from tests.engine_parts import (
    GREEDY,
    engine_config,
    logits_of,
    make_engine,
    make_model,
    make_prompt,
    pages_used,
    patches,
    run_all,
)
from tests.small_models import small_config, small_model

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
    engine = make_engine(ScriptedModel([5] * 20), engine_config(), max_length=10)
    output = one(engine, max_tokens=None)
    assert (len(output.token_ids), output.finish_reason) == (7, "length")


def test_max_tokens_0_only_runs_the_prompt(model: Any) -> None:
    [output] = run_all(make_engine(model, model.config), [make_prompt(model.config, [9])], SamplingParams(max_tokens=0))
    assert (output.token_ids, output.finish_reason) == ((), "length")


def test_usage_counts_every_position_and_pictures_apart(model: Any) -> None:
    prompt = make_prompt(model.config, [5, (3, 5), 4])
    [output] = run_all(make_engine(model, model.config), [prompt], replace(GREEDY, max_tokens=3))
    assert output.usage.prompt_tokens == len(prompt)
    assert output.usage.picture_tokens == len(prompt) - 9 == prompt.spans[0].length
    assert output.usage.completion_tokens == 3


def test_pages_go_back_when_requests_end(model: Any) -> None:
    engine = make_engine(model, model.config)
    ids = [engine.add(make_prompt(model.config, [20, (4, 4), 10 + n]), GREEDY) for n in range(3)]
    engine.step()
    assert min(pages_used(engine).values()) >= 0 and max(pages_used(engine).values()) > 0
    while engine.has_work:
        engine.step()
    assert set(pages_used(engine).values()) == {0}
    assert len(set(ids)) == 3


def test_window_pages_go_back_during_a_long_answer(model: Any) -> None:
    engine = make_engine(model, model.config, step=100)
    engine.add(make_prompt(model.config, [300]), replace(GREEDY, max_tokens=60))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, pages_used(engine)["window"])
    assert most <= 4


def test_abort_frees_everything_at_once_whatever_the_request_was_doing(model: Any) -> None:
    engine = make_engine(model, model.config, step=45, max_sequences=1)
    prompt = make_prompt(model.config, [30, (5, 5), 60])
    running, waiting = engine.add(prompt, GREEDY), engine.add(prompt, GREEDY)
    engine.step()
    assert engine.abort(waiting) is not None
    last = engine.abort(running)
    assert last is not None and last.finish_reason == "abort" and last.output is not None
    assert set(pages_used(engine).values()) == {0}
    assert not engine.has_work and engine.step() == []
    assert engine.abort(running) is None
    assert len(run_all(engine, [prompt])[0].token_ids) == 8


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
    config = engine_config()
    engine = Engine(
        ScriptedModel([0, 5]),
        config,
        EngineConfig(max_step_tokens=64),
        dtype=torch.float32,
        device=torch.device("cpu"),
        banned=[0, EOS, 10**6],
    )
    output = one(engine, max_tokens=1, temperature=0)
    assert output.token_ids[0] != 0
    engine = make_engine(ScriptedModel([EOS]), config)
    assert one(engine, temperature=0).finish_reason == "stop"


@pytest.mark.parametrize(
    ("parts", "params", "error", "match"),
    [
        ([[70]], {}, PromptError, "70"),
        ([list(range(2, 60)) * 80], {}, CapacityError, "4640 tokens .* 4096"),
        ([list(range(2, 66)) * 64], {}, CapacityError, "no room"),
        ([[5]], {"stop": "end"}, PromptError, "tokenizer"),
    ],
)
def test_what_cannot_run_is_refused_when_it_is_added(
    parts: Any, params: dict[str, Any], error: type[Exception], match: str, model: Any
) -> None:
    engine = make_engine(model, model.config)
    with pytest.raises(error, match=match):
        prompt = prompt_from_parts(parts, model.config)
        engine.add(prompt, SamplingParams(**params))
    assert not engine.has_work


def test_a_prompt_as_long_as_the_limit_may_be_scored(model: Any) -> None:
    engine = make_engine(model, model.config, max_length=50)
    prompt = make_prompt(model.config, [50])
    assert logits_of(engine, prompt).isfinite().all()
    with pytest.raises(CapacityError):
        engine.add(prompt, SamplingParams(max_tokens=1))


def test_a_request_that_never_fits_into_memory_is_refused_at_once(model: Any) -> None:
    engine = make_engine(model, model.config, cache_bytes=400_000, max_sequences=2)
    with pytest.raises(CapacityError, match="cache_bytes"):
        engine.add(make_prompt(model.config, [3000]), GREEDY)
    run_all(engine, [make_prompt(model.config, [30])])


def test_pictures_are_refused_where_there_is_no_tower() -> None:
    vision, text = engine_config(), small_config(vision_n_layers=0)
    prompt = prompt_from_parts([[5, 6], patches(2, 2)], vision)
    engine = make_engine(small_model(config=text), text)
    with pytest.raises(PromptError, match="picture"):
        engine.add(prompt, GREEDY)
    closed = make_engine(small_model(config=vision, pictures=False), vision, images=0)
    with pytest.raises(PromptError, match="images"):
        closed.add(prompt, GREEDY)


def test_a_step_smaller_than_a_picture_is_refused_at_the_start(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_step_tokens is 39.* at least 40"):
        make_engine(model, model.config, step=39)
    make_engine(model, model.config, step=39, images=0)


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


def test_a_failing_step_ends_only_its_own_requests(model: Any) -> None:
    engine = make_engine(FailingModel(model, {2}), model.config, step=40, max_sequences=2)
    prompts = [make_prompt(model.config, [10 + n]) for n in range(4)]
    ids = [engine.add(prompt, GREEDY) for prompt in prompts]
    engine.step()
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    assert set(pages_used(engine).values()) == {0}
    outputs = {}
    while engine.has_work:
        outputs |= {d.request_id: d.output for d in engine.step() if d.output is not None}
    assert [outputs[i].finish_reason for i in ids] == ["abort", "abort", "length", "length"]
    assert outputs[ids[0]].error is not None and outputs[ids[2]].error is None
    alone = run_all(make_engine(model, model.config), prompts[2:])
    assert [outputs[i].token_ids for i in ids[2:]] == [output.token_ids for output in alone]


def test_an_answer_that_ended_before_the_failure_in_its_step_is_not_lost(model: Any) -> None:
    class BrokenHead(FailingModel):
        def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of luck")

    engine = make_engine(BrokenHead(model, set()), model.config)
    scored = engine.add(make_prompt(model.config, [6]), SamplingParams(max_tokens=0))
    drawing = engine.add(make_prompt(model.config, [6]), GREEDY)
    with pytest.raises(RuntimeError):
        engine.step()
    assert {delta.request_id: delta.finish_reason for delta in engine.step()} == {scored: "length", drawing: "abort"}
    assert not engine.has_work


def test_ids_outside_the_vocabulary_are_refused_with_their_place(model: Any) -> None:
    prompt = make_prompt(model.config, [4])
    for bad in (-1, 70, 129280):
        ids = prompt.ids_T.copy()
        ids[2] = bad
        with pytest.raises(PromptError, match=f"id {bad} at position 2"):
            make_engine(model, model.config).add(replace(prompt, ids_T=ids), GREEDY)


class SpoiltModel:
    """The real model, but one request's logits are not numbers."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._model.logits(hidden, rows)
        if len(out) > 1:
            out[0] = float("nan")
        return out


def test_a_request_without_finite_logits_ends_with_an_error_and_spoils_no_other(model: Any) -> None:
    prompts = [make_prompt(model.config, [7 + n]) for n in range(2)]
    bad, good = run_all(make_engine(SpoiltModel(model), model.config), prompts)
    assert bad.finish_reason == "abort" and bad.error is not None and "finite" in bad.error
    assert good.token_ids == run_all(make_engine(model, model.config), prompts[1:])[0].token_ids


def counting_ops(counter: Counter[str]) -> Ops:
    """The reference ops, each call counted."""
    ops = bind_ops("cpu", "float32", "reference")

    def counted(name: str, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            counter[name] += 1
            return call(*args, **kwargs)

        return run

    names = [field.name for field in fields(Ops) if field.name != "chosen"]
    return replace(ops, **{name: counted(name, getattr(ops, name)) for name in names})


@pytest.mark.parametrize("pictures", [False, True])
def test_op_calls_of_a_step_do_not_depend_on_the_number_of_sequences(pictures: bool) -> None:
    counter: Counter[str] = Counter()
    config = engine_config()
    model = small_model(1, config=config, ops=counting_ops(counter))
    shape: list[int | tuple[int, int]] = [5, (2, 3), 140] if pictures else [140]
    per_step = {}
    for sequences in (1, 2, 6):
        engine = make_engine(model, config, step=1000)
        for number in range(sequences):
            engine.add(make_prompt(config, shape, seed=number), GREEDY)
        steps = []
        while engine.has_work:
            counter.clear()
            engine.step()
            steps.append(dict(counter))
        per_step[sequences] = steps
    assert per_step[1] == per_step[2] == per_step[6]
    assert sum(per_step[1][0].values()) > 50


def test_all_pictures_of_a_step_are_encoded_in_one_call(model: Any) -> None:
    calls: list[int] = []

    class Watching(FailingModel):
        def encode_images(self, images: Any) -> torch.Tensor:
            calls.append(len(images.grids_I2))
            out: torch.Tensor = self._model.encode_images(images)
            return out

    engine = make_engine(Watching(model, set()), model.config, step=400)
    run_all(engine, [make_prompt(model.config, [3, (2, 2), (3, 3)], seed=n) for n in range(3)])
    assert calls == [6]
    calls.clear()
    engine = make_engine(Watching(model, set()), model.config, step=40)
    run_all(engine, [make_prompt(model.config, [3, (4, 4), 2, (4, 4), (5, 5)])])
    assert sum(calls) == 3, "each picture is encoded once, whatever the chunks"


def test_image_rows_are_dropped_once_the_picture_is_behind(model: Any) -> None:
    engine = make_engine(model, model.config, step=40)
    prompt = make_prompt(model.config, [3, (4, 4), 30, (4, 4), 3])
    request = engine.add(prompt, GREEDY)
    sequence = engine._sequences[request]
    ends = [span.start + span.length for span in prompt.spans]
    while engine.has_work:
        engine.step()
        assert set(sequence.image_rows) <= {p for p, end in enumerate(ends) if end > sequence.computed}
    assert not sequence.image_rows


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
