"""Where every answer of a step is greedy, nobody needs whole logits; the tokens are those that whole logits give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from spyglass.engine.request import SamplingParams
from spyglass.engine.sequence import Answer, Request, TokenSequence
from spyglass.engine.structured.grammar import GrammarMatcher
from tests.engine_parts import GREEDY, engine_config, make_engine, make_prompt, run_all
from tests.small_models import ops_of, small_model


class Counted:
    """A model that counts how its tokens were asked for."""

    def __init__(self, model: Any) -> None:
        self._model, self.whole, self.argmax_calls = model, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, hidden_TC: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        self.whole += 1
        out: torch.Tensor = self._model.logits(hidden_TC, rows_R)
        return out

    def argmax(self, hidden_TC: torch.Tensor, rows_R: torch.Tensor, banned_V: torch.Tensor) -> Any:
        self.argmax_calls += 1
        return self._model.argmax(hidden_TC, rows_R, banned_V)


@pytest.fixture(scope="module")
def fast() -> Any:
    return small_model(4, config=engine_config(), ops=ops_of(("cpu", "auto")))


def answers(model: Any, params: Any, **options: Any) -> tuple[list[tuple[int, ...]], Counted]:
    counted = Counted(model)
    prompts = [make_prompt(engine_config(), [length], seed=length) for length in (5, 9, 30)]
    outputs = run_all(make_engine(counted, engine_config(), **options), prompts, params)
    return [tuple(output.token_ids) for output in outputs], counted


def test_greedy_answers_are_those_of_whole_logits(fast: Any) -> None:
    long = replace(GREEDY, max_tokens=40)
    got, counted = answers(fast, long)
    expected, whole = answers(fast, replace(long, logprobs=0))
    assert got == expected and len(set(got)) == 3
    assert counted.whole == 0 and counted.argmax_calls > 0
    assert whole.whole > 0 and whole.argmax_calls == 0


def test_banned_ids_are_never_the_likeliest(fast: Any) -> None:
    """Id 0 is banned; with a head that gives it more than all others the second best is drawn."""
    model = small_model(4, config=engine_config(), ops=ops_of(("cpu", "auto")))
    assert model.head.weight is not None
    model.head.weight.data[0] = 0
    got, _ = answers(model, replace(GREEDY, max_tokens=20))
    assert all(0 not in ids for ids in got)
    model.head.weight.data[2:] = -1e-3 * model.head.weight.data[2:].abs()  # nothing but 0 and its like is left
    got, _ = answers(model, replace(GREEDY, max_tokens=20))
    assert all(0 not in ids for ids in got)


@pytest.mark.parametrize(
    "other",
    [
        SamplingParams(temperature=0.7, seed=1, max_tokens=8, ignore_eos=True),
        replace(GREEDY, logprobs=2),
        replace(GREEDY, logit_bias={7: 50.0}),
        replace(GREEDY, presence_penalty=1.5),
    ],
)
def test_a_step_with_anybody_who_needs_more_has_whole_logits(fast: Any, other: SamplingParams) -> None:
    got, counted = answers(fast, [GREEDY, other, GREEDY])
    assert counted.argmax_calls == 0 and counted.whole > 0
    alone, _ = answers(fast, GREEDY)
    assert [got[0], got[2]] == [alone[0], alone[2]]
    if other.logit_bias:
        assert got[1] == (7,) * 8


def test_an_answer_that_follows_a_form_needs_more() -> None:
    class Matcher:
        def copy(self) -> Matcher:
            return self

    prompt = make_prompt(engine_config(), [4])
    free = Request(prompt=prompt, params=GREEDY)
    bound = Request(prompt=prompt, params=GREEDY, matcher=cast(GrammarMatcher, Matcher()))
    assert TokenSequence(0, free, Answer(free, limit=1)).is_greedy
    assert not TokenSequence(0, bound, Answer(bound, limit=1)).is_greedy


def test_a_row_of_no_numbers_ends_its_answer(fast: Any) -> None:
    model = small_model(4, config=engine_config(), ops=ops_of(("cpu", "auto")))
    assert model.head.weight is not None
    model.head.weight.data[5] = float("nan")
    counted = Counted(model)
    [output] = run_all(make_engine(counted, engine_config()), [make_prompt(engine_config(), [4])])
    assert output.finish_reason == "abort" and "finite" in str(output.error) and counted.argmax_calls == 1


def test_a_model_without_such_a_kernel_gives_whole_logits() -> None:
    got, counted = answers(small_model(4, config=engine_config()), GREEDY)
    assert counted.whole == counted.argmax_calls > 0 and len(got) == 3
