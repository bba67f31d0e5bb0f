"""Images unpacked in processes of their own: the same patches, and an image that takes too long takes only itself."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from spyglass.errors import PromptError
from spyglass.prompt import plan_image
from spyglass.prompt.build import unpack_image
from spyglass.prompt.decode import CHAT_RULES, open_image
from spyglass.prompt.tokens import ImagePlan
from spyglass.server.workers import ImageWorkers
from tests.server.protocol_parts import config_of


def photo(seed: int, width: int = 90, height: int = 70) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def plan_of(width: int = 90, height: int = 70) -> ImagePlan:
    vision = config_of("deepseek_v4").vision
    assert vision is not None
    return plan_image(width, height, vision)


def test_patches_are_those_that_would_be_made_here_from_any_number_of_threads() -> None:
    workers = ImageWorkers()

    def both(seed: int) -> bool:
        file = photo(seed)
        there = workers(file, CHAT_RULES, plan_of(), "image 0")
        here = unpack_image(open_image(file), CHAT_RULES, plan_of(), "image 0")
        return bool((there == here).all()) and there.dtype == here.dtype and there.shape == here.shape

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(both, range(6)))
    workers.close()


def test_what_is_wrong_with_an_image_is_told_as_here() -> None:
    workers = ImageWorkers()
    file = photo(0)[:5000]
    with pytest.raises(PromptError) as here:
        unpack_image(open_image(file), CHAT_RULES, plan_of(), "image 3")
    with pytest.raises(PromptError) as there:
        workers(file, CHAT_RULES, plan_of(), "image 3")
    assert str(there.value) == str(here.value) and "image 3" in str(there.value)
    workers.close()


@pytest.mark.parametrize("limits", [{"cpu_seconds": 0.0001}, {"memory": 1 << 20}])
def test_an_image_that_takes_too_much_ends_its_process_and_nothing_else(limits: dict[str, float]) -> None:
    workers = ImageWorkers(**limits)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(PromptError, match="image 0 takes too long or too much memory to unpack"):
            workers(photo(0, 900, 700), CHAT_RULES, plan_of(900, 700), "image 0")
    workers.close()
