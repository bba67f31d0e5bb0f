"""The largest images and all kinds of steps, to be tried before anything is promised: nothing fails or waits later."""

from __future__ import annotations

import numpy as np

from spyglass.config.model import ModelConfig, VisionConfig
from spyglass.errors import PromptError
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.plan import plan_image
from spyglass.prompt.tokens import ImagePlan, Patches, Prompt

_LONGEST = 64  # in aligner cells; the longest blocks belong to images one pixel wide and 10 to 40 cells high


def largest_images(vision: VisionConfig) -> list[ImagePlan]:
    """The image with the most tokens (378 before pads on released V4, 1,024 on V4.1), and one with the most patches.

    Of patches, which only decide about memory, odd shapes may have a tenth more.
    """
    side = vision.patch_size * vision.downsample_ratio
    lines = [(1, length) for length in range(1, _LONGEST * side)]
    sizes = (
        lines
        + [(length, 1) for _, length in lines]
        + [(side * x, side * y) for x, y in np.ndindex(_LONGEST, _LONGEST) if x * y]
    )
    plans: dict[tuple[int, int], ImagePlan] = {}
    for width, height in sizes:
        try:
            plan = plan_image(width, height, vision)
        except PromptError:  # a shape that this model does not take
            continue
        plans.setdefault(plan.vit_grid, plan)
    longest = max(plans.values(), key=lambda plan: plan.num_tokens)
    widest = max(plans.values(), key=lambda plan: plan.vit_grid[0] * plan.vit_grid[1])
    return [longest] if longest is widest else [longest, widest]


def blank(plan: ImagePlan) -> Patches:
    """A black image of this plan."""
    shape = plan.vit_grid[0] * plan.vit_grid[1], 3, plan.patch_size, plan.patch_size
    return Patches(np.zeros(shape, np.uint8), plan.vit_grid)


def noise(plan: ImagePlan) -> Patches:
    """An image of this plan with every value somewhere, the same each time."""
    shape = blank(plan).pixels.shape
    return Patches(np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8), plan.vit_grid)


def largest_prompts(config: ModelConfig, *, images: bool, tokens: int) -> list[Prompt]:
    """A prompt for each of the largest images, if the model is to see, and text up to `tokens` tokens, at least 1."""
    text = [config.bos_token_id or 0]
    if config.vision is None or not images:
        return [prompt_from_parts([text * max(1, tokens)], config)]
    prompts = []
    for plan in largest_images(config.vision):
        image = blank(plan)
        block = len(prompt_from_parts([image], config))
        prompts.append(prompt_from_parts([image, text * max(1, tokens - block)], config))
    return prompts
