"""Pictures on their way through the engine: one call of the tower per step, and no tampered prompt comes that far."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from spyglass.batch.types import ImageBatch
from spyglass.engine.request import SamplingParams
from spyglass.errors import PromptError
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.tokens import Patches, Prompt
from tests.engine_parts import GREEDY, logits_of, make_engine, make_model, make_prompt, run_all
from tests.tolerance import assert_law


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(seed=5)


class Watched:
    """The same model; `calls` holds the number of pictures of every call of the tower."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def encode_images(self, images: ImageBatch) -> torch.Tensor:
        self.calls.append(len(images.grids_I2))
        out: torch.Tensor = self.model.encode_images(images)
        return out


def pixel_picture(rows: int, columns: int, seed: int) -> Patches:
    pixels = np.random.default_rng(seed).integers(0, 256, (rows * columns, 3, 4, 4), dtype=np.uint8)
    return Patches(pixels, (rows, columns))


def test_all_pictures_of_a_step_go_through_the_tower_in_one_call(model: Any) -> None:
    """Pictures of several requests, given as pixels and as floats."""
    watched = Watched(model)
    prompts = [
        make_prompt(model.config, [3, (4, 4), (2, 3), 5]),
        prompt_from_parts([[5, 6], pixel_picture(3, 3, 1), [7]], model.config),
        make_prompt(model.config, [9, (1, 1)]),
    ]
    run_all(make_engine(watched, model.config, step=512), prompts)
    assert watched.calls == [4]


def test_a_picture_of_pixels_beside_one_of_floats_reads_the_same(model: Any) -> None:
    pixels = pixel_picture(3, 4, 2)
    value = (pixels.pixels.astype(np.float32) / 255 - 0.5) / 0.5
    floats = Patches(torch.from_numpy(value).bfloat16().float().numpy(), (3, 4))
    both = [prompt_from_parts([[5], pixels, first, [6, 7]], model.config) for first in (pixels, floats)]
    same, mixed = (logits_of(make_engine(model, model.config, step=512), prompt) for prompt in both)
    assert_law(mixed, same)


def tampered(prompt: Prompt, picture: int, change: int) -> Prompt:
    patches = list(prompt.patches)
    patches[picture] = np.resize(patches[picture], (len(patches[picture]) + change, 3, 4, 4))
    return dataclasses.replace(prompt, patches=tuple(patches))


@pytest.mark.parametrize("picture", [0, 1])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_prompt_with_a_patch_too_many_or_too_few_is_refused_when_it_arrives(
    model: Any, picture: int, change: int
) -> None:
    prompt = make_prompt(model.config, [3, (4, 4), (2, 3), 5])
    engine = make_engine(model, model.config)
    with pytest.raises(PromptError, match=rf"image {picture}: its grid of"):
        engine.add(tampered(prompt, picture, change), GREEDY)
    assert not engine.has_work


def test_a_prompt_without_the_patches_of_its_last_picture_is_refused(model: Any) -> None:
    prompt = make_prompt(model.config, [3, (4, 4), (2, 3), 5])
    short = dataclasses.replace(prompt, patches=prompt.patches[:1])
    with pytest.raises(PromptError, match="image 1 is missing"):
        make_engine(model, model.config).add(short, SamplingParams())


def test_a_span_with_another_number_of_image_positions_is_refused(model: Any) -> None:
    prompt = make_prompt(model.config, [3, (4, 4), 5])
    span = dataclasses.replace(prompt.spans[0], order=prompt.spans[0].order[:-1])
    with pytest.raises(PromptError, match="image 0: 3 image positions"):
        make_engine(model, model.config).add(dataclasses.replace(prompt, spans=(span,)), SamplingParams())
