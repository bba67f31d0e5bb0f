"""However requests share steps, each gets what it gets alone (fp32, plain): the laws through the real step loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spyglass.batch.images import pack_images
from spyglass.engine.request import SamplingParams
from spyglass.prompt.build import prompt_from_parts
from tests.driver import Tokens, prefill
from tests.engine_parts import GREEDY, logits_of, make_engine, make_model, make_prompt, pages_used, run_all
from tests.tolerance import LAW_OF_MAX, Tolerance, assert_close, assert_law

# text and pictures: two adjacent ones, one longer than the window of 9, some behind a long stretch of text
MIXED = [3, (4, 4), 5, (6, 6), (3, 5), 7, (2, 2), 130]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(seed=3)


@pytest.fixture(scope="module")
def whole(model: Any) -> torch.Tensor:
    return logits_of(make_engine(model, model.config, step=512), make_prompt(model.config, MIXED))


@pytest.mark.parametrize("step", [40, 41, 43, 47, 64, 100])
def test_chunked_prefill_at_any_budget_equals_whole_prefill(step: int, model: Any, whole: torch.Tensor) -> None:
    engine = make_engine(model, model.config, step=step)
    assert_law(logits_of(engine, make_prompt(model.config, MIXED)), whole, f"step {step}")


def test_the_engine_equals_the_plain_driver(model: Any, whole: torch.Tensor) -> None:
    """Every row, picture row and visible range reaches the model as the prompt says."""
    prompt = make_prompt(model.config, MIXED)
    images = pack_images(
        prompt.patches,
        [plan.vit_grid for plan in prompt.plans],
        model.config.vision,
    )
    tokens = Tokens(
        ids_T=prompt.ids_T,
        kinds_T=prompt.kinds_T,
        visible_T2=prompt.visible_T2,
        image_row_T=prompt.image_row_T,
        image_rows=model.encode_images(images),
    )
    assert_law(whole, prefill(model, tokens))


def test_logits_in_blocks_of_rows_equal_all_at_once(
    model: Any, whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spyglass.engine.loop.LOGITS_AT_ONCE", 7 * model.config.text.vocab_size)
    assert_law(logits_of(make_engine(model, model.config, step=60), make_prompt(model.config, MIXED)), whole)


def test_pictures_matter_in_every_chunking(model: Any, whole: torch.Tensor) -> None:
    other = logits_of(make_engine(model, model.config, step=40), make_prompt(model.config, MIXED, seed=100))
    assert other.shape == whole.shape
    assert (other[-1] - whole[-1]).abs().max() > 1e-2 * whole.abs().max()


@pytest.mark.parametrize("length", [1, 4, 9, 30, 126, 127, 128, 255])
def test_decoding_equals_running_the_whole_sequence_at_once(length: int, model: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0)
    [output] = run_all(make_engine(model, model.config), [make_prompt(model.config, [length])], params)
    prompt = make_prompt(model.config, [length])
    ids = np.concatenate([prompt.ids_T, np.array(output.token_ids, np.int32)])
    grown = prompt_from_parts([ids], model.config)
    logits = logits_of(make_engine(model, model.config, step=512), grown)[length - 1 : -1]
    assert output.logprobs is not None
    expected = logits.log_softmax(-1)[torch.arange(9), torch.tensor(output.token_ids)]
    scale = float(logits.abs().max())
    law = Tolerance(absolute=LAW_OF_MAX * scale, why="equivalence law")
    assert_close(torch.tensor([entry.logprob for entry in output.logprobs]), expected, law)
    logits[:, 0] = float("-inf")  # the one banned id
    assert output.token_ids == tuple(logits.argmax(-1).tolist())


def requests(config: Any) -> list[Any]:
    shapes = [[1], [140], MIXED, [6, (5, 3), 11], [67], [(4, 4)], [2, (6, 6), (6, 6), 3], [33], [5, (1, 1), 2]]
    return [make_prompt(config, shape, seed=10 * number) for number, shape in enumerate(shapes)]


@pytest.mark.parametrize("step", [40, 57, 300])
def test_together_equals_alone_at_temperature_0(step: int, model: Any) -> None:
    prompts = requests(model.config)
    together = run_all(make_engine(model, model.config, step=step), prompts)
    alone = [run_all(make_engine(model, model.config, step=512), [prompt])[0] for prompt in prompts]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


def test_together_equals_alone_with_seeds(model: Any) -> None:
    """Random numbers belong to a request, not to its place in a batch or to the steps it took."""
    prompts = requests(model.config)
    params = [
        SamplingParams(seed=number, max_tokens=6, ignore_eos=True, temperature=0.5 + 0.1 * number, top_k=number * 3)
        for number in range(len(prompts))
    ]
    together = run_all(make_engine(model, model.config, step=43), prompts, params)
    reverse = run_all(make_engine(model, model.config, step=80), prompts[::-1], params[::-1])[::-1]
    alone = [
        run_all(make_engine(model, model.config, step=512), [prompt], [own])[0]
        for prompt, own in zip(prompts, params, strict=True)
    ]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone] == [o.token_ids for o in reverse]


def test_requests_that_come_and_go_leave_the_others_alone(model: Any) -> None:
    """Arrivals in the middle, aborts in prefill and decode: the survivors answer as alone, nothing stays held."""
    prompts = requests(model.config)
    engine = make_engine(model, model.config, step=44, max_sequences=4)
    random = np.random.default_rng(1)
    waiting, ids, done = list(enumerate(prompts)), {}, {}
    doomed = {1, 4, 6}
    steps = 0
    while waiting or engine.has_work:
        if waiting and (steps % 2 == 0 or not engine.has_work):
            number, prompt = waiting.pop(0)
            ids[engine.add(prompt, GREEDY)] = number
        for delta in engine.step():
            if delta.output is not None:
                done[ids[delta.request_id]] = delta.output
        for request, number in ids.items():
            if number in doomed and random.random() < 0.4 and (last := engine.abort(request)) is not None:
                assert last.finish_reason == "abort"
                done[number] = last.output
        steps += 1
    assert set(pages_used(engine).values()) == {0}
    for number, prompt in enumerate(prompts):
        alone = run_all(make_engine(model, model.config, step=512), [prompt])[0]
        if done[number].finish_reason == "abort":
            assert alone.token_ids[: len(done[number].token_ids)] == done[number].token_ids
        else:
            assert done[number].token_ids == alone.token_ids
    assert any(output.finish_reason == "abort" for output in done.values())


def test_a_fixed_memory_that_fits_two_at_a_time_serves_all(model: Any) -> None:
    prompts = requests(model.config)
    engine = make_engine(model, model.config, step=40, max_sequences=2, cache_bytes=1_100_000, max_length=400)
    held = engine.allocator.bytes_allocated
    assert held <= 1_100_000
    together = run_all(engine, prompts)
    assert engine.allocator.bytes_allocated == held
    alone = [run_all(make_engine(model, model.config, step=512), [prompt])[0] for prompt in prompts]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
