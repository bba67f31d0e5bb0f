"""What is tried before anything is promised: the largest pictures there are, and nothing of it stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spyglass.config.model import ModelConfig
from spyglass.config.read import parse_model_config
from spyglass.engine.stats import EngineStats
from spyglass.engine.warm_up import largest_images, largest_prompts
from spyglass.errors import CapacityError, PromptError, SpyglassError
from spyglass.prompt.plan import plan_image
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
from tests.small_v41 import small_v41_config
from tests.unit.config.family_configs import flash_vision
from tests.unit.config.v41_released import official

RELEASED = {"v4": parse_model_config(flash_vision(), "v4"), "v41": parse_model_config(official(), "v41")}
CONFIGS = [*RELEASED.values(), engine_config(), small_v41_config()]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(seed=1)


@pytest.mark.parametrize(("family", "longest", "block"), [("v4", 378, 381), ("v41", 1024, 1024)])
def test_the_largest_pictures_of_the_released_models_are_those_that_a_search_finds(
    family: str, longest: int, block: int
) -> None:
    """Field measurements over 377,000 sizes: no V4 block above 378 tokens before its pads, no V4.1 span above 1,024."""
    config = RELEASED[family]
    assert config.vision is not None
    plans = largest_images(config.vision)
    assert plans[0].num_tokens == longest
    prompts = largest_prompts(config, images=True, tokens=1)
    assert prompts[0].spans[0].length == block
    assert [len(prompt) for prompt in prompts] == [prompt.spans[0].length + 1 for prompt in prompts]
    assert [len(prompt) for prompt in largest_prompts(config, images=True, tokens=2048)] == [2048] * len(prompts)
    [text] = largest_prompts(config, images=False, tokens=7)
    assert len(text) == 7 and not text.spans


LARGEST = [(config.vision, largest_images(config.vision)) for config in CONFIGS if config.vision is not None]


@given(width=st.integers(1, 20_000), height=st.integers(1, 20_000))
def test_no_picture_is_larger_than_the_largest(width: int, height: int) -> None:
    for number, (vision, plans) in enumerate(LARGEST):
        try:
            plan = plan_image(width, height, vision)
        except PromptError:
            continue
        assert plan.num_tokens <= max(p.num_tokens for p in plans) <= vision.max_tokens
        if number < len(RELEASED):
            assert plan.vit_grid[0] * plan.vit_grid[1] <= 1.1 * max(p.vit_grid[0] * p.vit_grid[1] for p in plans)


class Watched(FailingModel):
    """Notes the tokens of every step and the pictures of every call of the tower."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, set())
        self.steps: list[int] = []
        self.pictures = 0

    def embed(self, batch: Any, rows: Any) -> torch.Tensor:
        self.steps.append(len(batch.ids_T))
        return super().embed(batch, rows)

    def encode_images(self, images: Any) -> torch.Tensor:
        self.pictures += len(images.grids_I2)
        out: torch.Tensor = self._model.encode_images(images)
        return out


def test_warming_up_runs_pictures_and_text_and_leaves_nothing_behind(model: Any) -> None:
    watched = Watched(model)
    engine = make_engine(watched, model.config, prefix_cache_bytes=1 << 20, image_cache_bytes=1 << 20)
    engine.warm_up()
    assert watched.pictures == 2 and sum(watched.steps) >= 2 * 35
    assert set(pages_used(engine).values()) == {0} and not engine.has_work
    assert replace(engine.stats(), image_queries=0, prefix_queries=0) == EngineStats(), "what it did counts for nobody"
    assert engine.prefixes.counts.bytes_held == engine.image_cache.counts.bytes_held == 0
    prompt = make_prompt(model.config, [9])
    assert run_all(engine, [prompt])[0].token_ids == run_all(make_engine(model, model.config), [prompt])[0].token_ids


def test_a_full_step_is_run_when_asked_for(model: Any) -> None:
    watched = Watched(model)
    make_engine(watched, model.config, step=90).warm_up(90)
    assert max(watched.steps) == 90


def test_pictures_that_no_request_could_have_are_left_out(model: Any) -> None:
    for options in ({"images": 0}, {"max_length": 20}):
        watched = Watched(model)
        make_engine(watched, model.config, **options).warm_up()
        assert watched.pictures == 0


def test_a_model_that_fails_at_it_is_not_ready(model: Any) -> None:
    class NoNumbers(Watched):
        def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return torch.full((len(rows), 70), float("nan"))

    class NoMemory(Watched):
        def encode_images(self, images: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("2 GB")

    for broken, error, match in ((NoNumbers, SpyglassError, "finite"), (NoMemory, CapacityError, "cache_bytes")):
        engine = make_engine(broken(model), model.config)
        with pytest.raises(error, match=match):
            engine.warm_up()
        assert not engine.has_work and set(pages_used(engine).values()) == {0}
    engine = make_engine(model, model.config)
    engine.add(make_prompt(model.config, [4]), GREEDY)
    with pytest.raises(AssertionError, match="before its first request"):
        engine.warm_up()


def test_small_configs_have_a_largest_picture_too() -> None:
    configs: list[ModelConfig] = [engine_config(), small_v41_config()]
    for config in configs:
        for prompt in largest_prompts(config, images=True, tokens=1):
            assert config.vision is not None
            assert prompt.spans[0].length <= config.vision.max_tokens
