"""Loads that took other engines down, in a small form: everyone gets an answer, and the one they get alone (fp32)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine_parts import GREEDY, logits_of, make_engine, make_model, make_prompt, pages_used, run_all
from tests.tolerance import assert_law


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(seed=3)


@pytest.mark.parametrize("length", [1023, 1024, 1025])
def test_a_prompt_around_a_round_length_ends_alike_at_any_chunk_size(length: int, model: Any) -> None:
    """A launch sized for a round number of keys fails just beyond it; a stall shows as a test that never ends."""
    prompt = make_prompt(model.config, [length])
    whole, chunked = (logits_of(make_engine(model, model.config, step=step), prompt) for step in (1100, 256))
    assert_law(chunked[-1], whole[-1], f"{length} tokens")


def test_eight_different_prompts_at_once_get_their_own_answers_round_after_round(model: Any) -> None:
    prompts = [make_prompt(model.config, [90 + number], seed=number) for number in range(8)]
    quiet = make_engine(model, model.config, step=512)
    alone = [run_all(quiet, [prompt])[0].token_ids for prompt in prompts]
    assert len(set(alone)) == len(alone)
    engine = make_engine(model, model.config, step=256, max_sequences=8)
    for _ in range(3):
        assert [output.token_ids for output in run_all(engine, prompts)] == alone


def test_sixty_four_prompts_at_once_in_a_memory_for_a_few_are_all_answered(model: Any) -> None:
    engine = make_engine(model, model.config, step=128, max_sequences=16, cache_bytes=1_900_000)
    held = engine.allocator.bytes_allocated
    prompts = [make_prompt(model.config, [60], seed=number) for number in range(64)]
    params = replace(GREEDY, max_tokens=3)
    outputs = run_all(engine, prompts, params)
    assert {(output.finish_reason, output.error, len(output.token_ids)) for output in outputs} == {("length", None, 3)}
    assert engine.allocator.bytes_allocated == held and set(pages_used(engine).values()) == {0}


@pytest.mark.parametrize("cached", [0, 40 * 48 * 4])
def test_requests_with_more_pictures_than_any_budget_holds_do_not_go_round_in_circles(cached: int, model: Any) -> None:
    """A step and an image cache for one largest picture; five of them in each of two requests."""
    engine = make_engine(model, model.config, step=40, image_cache_bytes=cached)
    largest = (4, 30)
    prompts = [make_prompt(model.config, [2, *[largest] * 5, 3], seed=number) for number in range(2)]
    assert all(span.length >= 34 for prompt in prompts for span in prompt.spans)
    ids = [engine.add(prompt, GREEDY) for prompt in prompts]
    outputs: dict[int, Any] = {}
    for _ in range(60):
        outputs |= {delta.request_id: delta.output for delta in engine.step() if delta.output is not None}
    assert not engine.has_work
    quiet = make_engine(model, model.config, step=512)
    assert [outputs[i].token_ids for i in ids] == [run_all(quiet, [prompt])[0].token_ids for prompt in prompts]
