"""What is refused, when, and that one request's trouble stays its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from spyglass.config.engine import EngineConfig
from spyglass.engine.cache.prefix import PrefixCache
from spyglass.engine.engine import Engine
from spyglass.engine.request import RequestOutput, SamplingParams
from spyglass.engine.scheduler import StuckError
from spyglass.errors import CapacityError, ConfigError, PromptError
from spyglass.prompt.build import prompt_from_parts
from tests.engine_parts import (
    GREEDY,
    FailingModel,
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
from tests.small_v41 import small_v41_config


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(seed=1)


@pytest.mark.parametrize(
    ("parts", "params", "error", "match"),
    [
        ([[70]], {}, PromptError, "70"),
        ([list(range(2, 60)) * 80], {}, CapacityError, "4640 tokens .* 4096"),
        ([list(range(2, 66)) * 64], {}, CapacityError, "no room"),
        ([[5]], {"stop": "end"}, PromptError, "tokenizer"),
        ([[5]], {"stop_token_ids": [5, 70]}, PromptError, "stop_token_ids holds 70"),
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
    with pytest.raises(PromptError, match="image"):
        engine.add(prompt, GREEDY)
    closed = make_engine(small_model(config=vision, pictures=False), vision, images=0)
    with pytest.raises(PromptError, match="images"):
        closed.add(prompt, GREEDY)


def test_a_step_smaller_than_a_picture_is_refused_at_the_start(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_step_tokens is 39.* at least 40"):
        make_engine(model, model.config, step=39)
    make_engine(model, model.config, step=39, images=0)


def test_pictures_that_may_be_cut_need_no_step_of_their_size() -> None:
    config = small_v41_config()
    assert config.vision is not None and config.vision.max_tokens > 8
    EngineConfig(max_step_tokens=8).check_model(config)


def test_a_prompt_of_nothing_and_pictures_unlike_their_plans_are_refused(model: Any) -> None:
    """Prompts may be made by hand; what is wrong with one must not come out in the middle of others' steps."""
    engine, text = make_engine(model, model.config), make_prompt(model.config, [4])
    empty = replace(
        text, **{name: getattr(text, name)[:0] for name in ("ids_T", "kinds_T", "image_row_T", "visible_T2")}
    )
    prompt = make_prompt(model.config, [4, (2, 2)])
    for wrong, match in [
        (empty, "the prompt is empty"),
        (replace(prompt, patches=(prompt.patches[0][:-1],)), "image 0"),
        (replace(prompt, patches=(prompt.patches[0][..., :-1],)), "image 0"),
        (replace(prompt, patches=()), "0 images have patches, 1 have a grid"),
    ]:
        with pytest.raises(PromptError, match=match):
            engine.add(wrong, GREEDY)
    assert not engine.has_work


def test_ids_outside_the_vocabulary_are_refused_with_their_place(model: Any) -> None:
    prompt = make_prompt(model.config, [4])
    for bad in (-1, 70, 129280):
        ids = prompt.ids_T.copy()
        ids[2] = bad
        with pytest.raises(PromptError, match=f"id {bad} at position 2"):
            make_engine(model, model.config).add(replace(prompt, ids_T=ids), GREEDY)


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


class Broken:
    """Stands for the text of an answer, and fails at token number `at`, or when the answer ends."""

    stopped_by = None

    def __init__(self, at: int) -> None:
        self._left = at

    def push(self, token: int) -> Any:
        self._left -= 1
        if self._left == 0:
            raise ValueError("out of luck")
        return "", False

    def finish(self) -> tuple[str, bool]:
        raise ValueError("out of luck")


class BrokenMatcher(Broken):
    """The same for its grammar matcher."""

    begun, complete, failed = False, False, None

    def push(self, token: int) -> Any:
        super().push(token)
        return None


@pytest.mark.parametrize(("part", "broken"), [("detokenizer", Broken), ("matcher", BrokenMatcher)])
def test_a_fault_in_the_text_or_grammar_of_one_answer_ends_only_that_answer(part: str, broken: Any, model: Any) -> None:
    engine = make_engine(model, model.config)
    prompts = [make_prompt(model.config, [7 + n]) for n in range(3)]
    ids = [engine.add(prompt, GREEDY) for prompt in prompts]
    setattr(engine.sequences[ids[1]].answer, part, broken(at=3))
    outputs = {}
    while engine.has_work:
        outputs |= {delta.request_id: delta.output for delta in engine.step() if delta.output is not None}
    assert [outputs[i].finish_reason for i in ids] == ["length", "abort", "length"]
    assert "ValueError" in (outputs[ids[1]].error or "") and len(outputs[ids[1]].token_ids) == 3
    assert set(pages_used(engine).values()) == {0}
    alone = run_all(make_engine(model, model.config), [prompts[0], prompts[2]])
    assert [outputs[i].token_ids for i in (ids[0], ids[2])] == [output.token_ids for output in alone]


def test_a_fault_while_an_answer_is_ended_leaves_nothing_held(model: Any) -> None:
    """Aborting it, or ending it after the model failed."""
    engine = make_engine(FailingModel(model, {2}), model.config)
    ids = [engine.add(make_prompt(model.config, [7 + n]), GREEDY) for n in range(3)]
    engine.step()
    for request in ids[:2]:
        engine.sequences[request].answer.detokenizer = Broken(at=100)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="out of luck"):
        engine.abort(ids[0])
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    assert {delta.request_id: delta.finish_reason for delta in engine.step()} == {ids[1]: "abort", ids[2]: "abort"}
    assert set(pages_used(engine).values()) == {0} and not engine.has_work


def over_after(engine: Engine, steps: int) -> dict[int, RequestOutput]:
    """What ended in so many steps; whoever has not ended by then is missing."""
    outputs = {}
    for _ in range(steps):
        outputs |= {delta.request_id: delta.output for delta in engine.step() if delta.output is not None}
    return outputs


def test_a_request_of_which_nothing_is_left_to_run_ends_with_an_error_and_the_others_go_on(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the cache knew all of a prompt: no row would be left to draw from."""
    prompts = [make_prompt(model.config, [7 + n]) for n in range(3)]
    alone = run_all(make_engine(model, model.config), prompts)
    engine = make_engine(model, model.config)
    ids = [engine.add(prompt, GREEDY) for prompt in prompts]
    spoilt = engine.sequences[ids[1]]
    monkeypatch.setattr(PrefixCache, "resume", lambda _, s: s.resume_from(s.length) if s is spoilt else None)
    with pytest.raises(StuckError, match="nothing of this request is left to run") as raised:
        engine.step()
    assert raised.value.sequences == (spoilt,)
    outputs = over_after(engine, 10)
    assert "nothing of this request is left" in str(outputs[ids[1]].error)
    assert [outputs[i].token_ids for i in (ids[0], ids[2])] == [alone[n].token_ids for n in (0, 2)]
    assert not engine.has_work and set(pages_used(engine).values()) == {0}


def test_a_step_that_finds_nothing_to_run_fails_and_ends_who_waits_first(model: Any) -> None:
    """Without a free table row nobody is ever admitted."""
    engine = make_engine(model, model.config, max_sequences=2)
    rows = [engine.allocator.admit() for _ in range(2)]
    ids = [engine.add(make_prompt(model.config, [7]), GREEDY) for _ in range(2)]
    with pytest.raises(StuckError, match="no step can be made"):
        engine.step()
    outputs = over_after(engine, 1)
    assert list(outputs) == [ids[0]] and outputs[ids[0]].error is not None
    for row in rows:
        assert row is not None
        engine.allocator.release(row)
    assert over_after(engine, 8)[ids[1]].error is None and not engine.has_work


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
