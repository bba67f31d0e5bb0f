"""V4.1: however a sequence is cut and whatever runs beside it, it gets the same logits (fp32, plain).

Unlike V4, a cut may fall anywhere: inside pictures, between the two tokens of a group, inside an engram look-back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spyglass.engine.request import SamplingParams
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.tokens import Patches, Prompt
from tests.engine_parts import GREEDY, logits_of, mixed_parts, pages_used, run_all
from tests.small_v41 import make_engine, small_v41_config, small_v41_model
from tests.tolerance import LAW_OF_MAX, Tolerance, assert_close, assert_law

MIXED: list[int | tuple[int, int]] = [3, (4, 4), 5, (6, 6), (3, 5), 7, (2, 2), 40]
MOVED = 5e-5  # regrouped sums move logits by a few 1e-6, an input that is seen by at least 1e-3


@pytest.fixture(scope="module")
def model() -> Any:
    return small_v41_model(seed=3)


def prompt_of(model: Any, shape: list[int | tuple[int, int]], seed: int = 0) -> Prompt:
    return prompt_from_parts(mixed_parts(shape, seed), model.config)


@pytest.fixture(scope="module")
def whole(model: Any) -> torch.Tensor:
    return logits_of(make_engine(model, step=512), prompt_of(model, MIXED))


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 7, 9, 13, 31, 50])
def test_cut_anywhere_equals_the_whole(step: int, model: Any, whole: torch.Tensor) -> None:
    prompt = prompt_of(model, MIXED)
    inside = [place for place in range(step, len(prompt), step) if (prompt.kinds_T[place - 1 : place + 1] >= 0).all()]
    assert inside, "no cut of this test falls into a picture"
    assert_law(logits_of(make_engine(model, step=step), prompt), whole, f"step {step}")


def test_pictures_matter_in_every_chunking(model: Any, whole: torch.Tensor) -> None:
    other = logits_of(make_engine(model, step=7), prompt_of(model, MIXED, seed=100))
    assert (other[-1] - whole[-1]).abs().max() > 1e-2 * whole.abs().max()


@pytest.mark.parametrize("length", [1, 2, 3, 8, 9, 10, 27, 60])
def test_decoding_equals_running_the_whole_sequence_at_once(length: int, model: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0)
    prompt = prompt_of(model, [length])
    [output] = run_all(make_engine(model), [prompt], params)
    ids = np.concatenate([prompt.ids_T, np.array(output.token_ids, np.int32)])
    grown = prompt_from_parts([ids], model.config)
    logits = logits_of(make_engine(model, step=512), grown)[length - 1 : -1]
    assert output.logprobs is not None
    expected = logits.log_softmax(-1)[torch.arange(9), torch.tensor(output.token_ids)]
    law = Tolerance(absolute=LAW_OF_MAX * float(logits.abs().max()), why="equivalence law")
    assert_close(torch.tensor([entry.logprob for entry in output.logprobs]), expected, law)


def test_together_equals_alone(model: Any) -> None:
    shapes: list[list[int | tuple[int, int]]] = [
        [1],
        [60],
        MIXED,
        [6, (5, 3), 11],
        [(4, 4)],
        [2, (6, 6), (6, 6), 3],
        [2],
    ]
    prompts = [prompt_of(model, shape, seed=10 * number) for number, shape in enumerate(shapes)]
    alone = [run_all(make_engine(model, step=512), [prompt])[0].token_ids for prompt in prompts]
    for step in (7, 40, 300):
        engine = make_engine(model, step=step)
        assert [output.token_ids for output in run_all(engine, prompts, GREEDY)] == alone
        assert set(pages_used(engine).values()) == {0}


def moved_rows(model: Any, parts: list[Any], changed: list[Any]) -> set[int]:
    """Rows whose logits differ between two prompts of one shape."""
    first, second = (
        logits_of(make_engine(model, step=512), prompt_from_parts(p, model.config)) for p in (parts, changed)
    )
    return set(torch.nonzero((first - second).abs().amax(dim=-1) > MOVED).flatten().tolist())


def test_pictures_are_causal_even_inside(model: Any) -> None:
    """A cell changes nothing before itself, neighbours of its own picture included (spec v41 7.3)."""
    parts = mixed_parts([4, (6, 6), 3, (4, 4), 9])
    changed = mixed_parts([4, (6, 6), 3, (4, 4), 9])
    picture = changed[1]
    pixels = picture.pixels.copy()
    pixels[-1] += 1.0  # the last patch: only the last cell of an encoder without attention, here all cells
    changed[1] = Patches(pixels, picture.vit_grid)
    assert min(moved_rows(model, parts, changed)) == 5  # START stands at 4 and sees nothing of the cells behind it


def test_text_is_causal_and_reaches_through_memory(model: Any) -> None:
    """Every row behind a changed id moves while it is in a window or can be picked; none before it does."""
    ids = mixed_parts([60])[0]
    for place in (0, 17, 40):
        changed = list(ids)
        changed[place] = (changed[place] + 5) % 60 + 2
        moved = moved_rows(model, [ids], [changed])
        assert min(moved) == place and moved >= set(range(place, min(place + 9, 60)))


def test_a_picture_in_the_lookback_hides_what_lies_behind_it(model: Any) -> None:
    """One layer with engram and a window of one row: nothing but the look-back reaches back, and pictures end it."""
    config = small_v41_config(
        num_hidden_layers=2,
        compress_ratios=[0, 0],
        kv_source_layer_ids=[],
        index_source_layer_ids=[],
        candidate_source_layer_id=None,
        engram_layer_ids=[1],
        engram_num_embeddings=[252],
        sliding_window=1,
    )
    short = small_v41_model(seed=5, config=config)

    def reached(parts: list[Any], changed: list[Any]) -> set[int]:
        return moved_rows(short, parts, changed)

    text = [10, 11, 12, 13, 14, 15, 16]
    assert reached([text], [[10, 40, *text[2:]]]) == {1, 2, 3, 4}
    picture = mixed_parts([(2, 2)])[0]  # START, cell, NEWLINE, END
    assert reached([text[:3], picture, text[3:]], [[10, 40, 12], picture, text[3:]]) == {1, 2}
    assert reached([text[:3], picture, text[3:]], [text[:3], picture, [40, *text[4:]]]) == {7, 8, 9, 10}


def test_the_memory_never_reaches_picture_rows(model: Any) -> None:
    """Other tables move text rows and leave the rows of a leading picture alone."""
    from tests.small_v41 import small_store

    prompt = prompt_of(model, [(4, 4), 6])
    first = logits_of(make_engine(model, step=512), prompt)
    second = logits_of(make_engine(model, step=512, store=small_store(model.config, seed=9)), prompt)
    moved = (first - second).abs().amax(dim=-1) > MOVED
    assert moved.tolist() == [kind < 0 for kind in prompt.kinds_T.tolist()]
