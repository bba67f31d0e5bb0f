"""The step loop: memory comes and goes, calls are few, pictures run once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from spyglass.ops.declare import Ops
from spyglass.ops.table import OPS, bind_ops
from tests.engine_parts import (
    GREEDY,
    FailingModel,
    engine_config,
    make_engine,
    make_model,
    make_prompt,
    pages_used,
    run_all,
)
from tests.small_models import small_model


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(seed=1)


def test_usage_counts_every_position_and_pictures_apart(model: Any) -> None:
    prompt = make_prompt(model.config, [5, (3, 5), 4])
    [output] = run_all(make_engine(model, model.config), [prompt], replace(GREEDY, max_tokens=3))
    assert output.usage.prompt_tokens == len(prompt)
    assert output.usage.image_tokens == len(prompt) - 9 == prompt.spans[0].length
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


def counting_ops(counter: Counter[str]) -> Ops:
    """The reference ops, each call counted."""
    ops = bind_ops("cpu", "float32", "reference")

    def counted(name: str, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            counter[name] += 1
            return call(*args, **kwargs)

        return run

    return ops.replaced(**{name: counted(name, getattr(ops, name)) for name in OPS})


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
    sequence = engine.sequences[request]
    ends = [span.start + span.length for span in prompt.spans]
    while engine.has_work:
        engine.step()
        assert set(sequence.image_rows) <= {p for p, end in enumerate(ends) if end > sequence.computed}
    assert not sequence.image_rows
