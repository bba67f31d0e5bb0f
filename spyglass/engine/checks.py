"""What is refused before anything runs."""

from __future__ import annotations

import numpy as np

from spyglass.batch.images import check_pictures
from spyglass.config.engine import EngineConfig
from spyglass.config.model import ModelConfig
from spyglass.errors import ConfigError, PromptError
from spyglass.prompt.tokens import Prompt


def check_step_size(config: ModelConfig, options: EngineConfig) -> None:
    """A picture that cannot be cut must fit into a step (spec v4 6.4).

    Raises:
        ConfigError: it does not; the message has the number it needs.
    """
    vision = config.vision
    if vision is None or not options.images or vision.layout != "paired":
        return
    if options.max_step_tokens < vision.max_tokens:
        raise ConfigError(
            f"max_step_tokens is {options.max_step_tokens}, but a picture of this model may take {vision.max_tokens} "
            f"tokens that must run in one step; raise it to at least {vision.max_tokens}, or set images=0"
        )


def check_prompt(prompt: Prompt, config: ModelConfig, *, images: int) -> None:
    """Ids, pictures and their number are such as the model can run.

    Raises:
        PromptError: the prompt is empty, has ids outside the vocabulary, more than `images` pictures, or pictures that
            do not agree with their plans.
    """
    if len(prompt) == 0:
        raise PromptError("the prompt is empty; give at least one token")
    outside = (prompt.ids_T >= config.text.vocab_size) | ((prompt.ids_T < 0) & (prompt.kinds_T < 0))
    if outside.any():
        place = int(np.flatnonzero(outside)[0])
        raise PromptError(
            f"the prompt has id {prompt.ids_T[place]} at position {place}; ids of text are 0 to "
            f"{config.text.vocab_size - 1}"
        )
    if len(prompt.plans) > images:
        raise PromptError(
            f"the prompt has {len(prompt.plans)} pictures, this model was loaded to take {images}; "
            "send fewer, or raise images (a text-only checkpoint takes none at all)"
        )
    if config.vision is not None:
        grids = [plan.vit_grid for plan in prompt.plans]
        check_pictures(prompt.patches, grids, [len(span.order) for span in prompt.spans], config.vision)
