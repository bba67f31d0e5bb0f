"""What rows may take: what is free, less all that a step and the caches may work with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spyglass.config.cache import cache_plans
from spyglass.config.engine import EngineConfig
from spyglass.engine.cache.allocator import CacheAllocator
from spyglass.engine.request import SamplingParams
from spyglass.engine.warm_up import largest_images
from spyglass.engine.workspace import estimated_step, with_cache_bytes, with_pace
from spyglass.errors import CapacityError
from spyglass.plan import USABLE, decoded_bytes
from spyglass.prompt.build import prompt_from_parts
from tests.engine_parts import engine_config, mixed_parts
from tests.small_models import small_config
from tests.small_v41 import make_engine, small_v41_model
from tests.unit.engine.test_warm_up import Watched

OPTIONS = EngineConfig(max_step_tokens=64, max_sequences=4, image_cache_bytes=1000)


def loaded(config: Any, dtype: torch.dtype = torch.bfloat16, stored: bool = False) -> Any:
    return SimpleNamespace(config=config, dtype=dtype, device=torch.device("cpu"), model=None, stores_rows=stored)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    def tell(count: int | None) -> None:
        for module in ("workspace", "fit"):
            monkeypatch.setattr(f"spyglass.engine.{module}.free_memory", lambda place: count)

    return tell


def test_rows_get_what_is_free_less_a_step_and_the_caches(free: Any) -> None:
    free(10**9)
    model = loaded(engine_config())
    step = estimated_step(OPTIONS, model)
    for stated, prefixes in ((None, 10**9 // 8), (5000, 5000)):
        chosen = with_cache_bytes(replace(OPTIONS, prefix_cache_bytes=stated), model, None)
        assert chosen.cache_bytes == int(10**9 * USABLE) - step - prefixes - 1000
        assert chosen.prefix_cache_bytes == prefixes


def test_what_was_stated_or_cannot_be_known_stays(free: Any) -> None:
    free(10**9)
    stated = replace(OPTIONS, cache_bytes=123)
    assert with_cache_bytes(stated, loaded(engine_config()), None) is stated
    free(None)
    assert with_cache_bytes(OPTIONS, loaded(engine_config()), None) is OPTIONS


def test_a_machine_with_nothing_left_for_requests_is_told_the_numbers(free: Any) -> None:
    free(50_000)
    model = loaded(engine_config())
    with pytest.raises(
        CapacityError, match=f"50,000 bytes may be taken .* a step takes {estimated_step(OPTIONS, model):,}"
    ):
        with_cache_bytes(OPTIONS, model, None)


def test_f5_memory_that_nobody_stated_is_told_as_what_is_free_and_not_as_an_option(free: Any) -> None:
    """What is left for rows is found, not stated: a message that it is too low must not say that somebody set it."""
    model = loaded(engine_config())
    free(int((estimated_step(OPTIONS, model) + 1000 + 20_000) / (USABLE - 1 / 8)))
    options = with_cache_bytes(OPTIONS, model, None)
    assert OPTIONS.cache_bytes is None and 0 < (options.cache_bytes or 0) < 100_000
    with pytest.raises(CapacityError, match=r"^a KV cache of .* is too small: .*; lower max_sequences, or state a"):
        CacheAllocator(
            cache_plans(model.config.text), dtype=torch.float32, device=torch.device("cpu"), max_sequences=3,
            step_tokens=64, max_length=64, cache_bytes=options.cache_bytes,
        )  # fmt: skip


def test_a_step_of_a_model_that_sees_or_is_wider_or_longer_works_with_more() -> None:
    sees, blind = loaded(engine_config()), loaded(small_config(vision_n_layers=0))
    assert estimated_step(OPTIONS, sees) > estimated_step(replace(OPTIONS, images=0), sees)
    assert estimated_step(replace(OPTIONS, images=0), sees) == estimated_step(OPTIONS, blind)
    assert estimated_step(OPTIONS, loaded(blind.config, torch.float32)) == 2 * estimated_step(OPTIONS, blind)
    longer = replace(OPTIONS, max_step_tokens=128)
    assert estimated_step(longer, sees) > 1.5 * estimated_step(OPTIONS, sees)


def test_rows_that_lie_as_codes_are_decoded_in_memory_of_every_thread() -> None:
    config = small_config(vision_n_layers=0)
    for options, number in ((OPTIONS, 2), (replace(OPTIONS, max_length=20), 2), (OPTIONS, 4)):
        dtype = torch.float32 if number == 4 else torch.bfloat16
        longest = options.max_length or config.text.max_position_embeddings
        more = estimated_step(options, loaded(config, dtype, stored=True)) - estimated_step(
            options, loaded(config, dtype)
        )
        assert more == decoded_bytes(config.text, longest, torch.get_num_threads(), number) > 0


def test_the_tower_counts_for_a_steps_worth_of_patches_or_one_picture_if_that_is_more() -> None:
    sees = loaded(engine_config())
    vision = sees.config.vision
    largest = max(plan.vit_grid[0] * plan.vit_grid[1] for plan in largest_images(vision))

    def tower(tokens: int) -> int:
        options = replace(OPTIONS, max_step_tokens=tokens)
        return estimated_step(options, sees) - estimated_step(replace(options, images=0), sees)

    assert tower(1) == tower(largest // vision.downsample_ratio**2) > 0
    assert tower(largest) == tower(1) * vision.downsample_ratio**2


def test_the_tower_never_gets_more_than_a_steps_worth_of_pictures_at_once() -> None:
    """Where pictures may be cut, every request of a step can begin one."""
    calls: list[int] = []
    model = small_v41_model(seed=1)

    class Counted(Watched):
        def encode_images(self, images: Any) -> torch.Tensor:
            out = super().encode_images(images)
            calls.append(len(out))
            return out

    watched = Counted(model)
    watched.config, watched.options = model.config, model.options  # type: ignore[attr-defined]
    engine = make_engine(watched, step=32)
    for number in range(6):
        prompt = prompt_from_parts(mixed_parts([(10, 10), 3], seed=number), model.config)
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=2))
    while engine.has_work:
        engine.step()
    assert watched.pictures == 6 and sum(calls) == 6 * 25
    assert max(calls) <= 32


@pytest.mark.parametrize(
    ("host", "expected"), [(None, None), (SimpleNamespace(many=None), None), (SimpleNamespace(many=257), 0)]
)
def test_steps_that_pay_for_copies_of_experts_are_not_cut_by_time(host: Any, expected: int | None) -> None:
    build = SimpleNamespace(host=host)
    loaded: Any = SimpleNamespace(model=SimpleNamespace(options=SimpleNamespace(build=build)))
    assert with_pace(EngineConfig(), loaded).step_milliseconds == expected
