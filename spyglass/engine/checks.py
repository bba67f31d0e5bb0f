"""What is refused before anything runs."""

from __future__ import annotations

import numpy as np

from spyglass.batch.images import check_images
from spyglass.config.model import ModelConfig
from spyglass.engine.request import SamplingParams
from spyglass.errors import CapacityError, PromptError
from spyglass.prompt.tokens import Prompt


def check_prompt(prompt: Prompt, config: ModelConfig, *, images: int) -> None:
    """Ids, images and their number are such as the model can run.

    Raises:
        PromptError: the prompt is empty, has ids outside the vocabulary, more than `images` images, or images that
            do not agree with their plans.
    """
    if len(prompt) == 0:
        raise PromptError("the prompt is empty; give at least one token")
    outside = (prompt.ids_T >= config.text.vocab_size) | ((prompt.ids_T < 0) & (prompt.kinds_T < 0))
    if outside.any():
        position = int(np.flatnonzero(outside)[0])
        raise PromptError(
            f"the prompt has id {prompt.ids_T[position]} at position {position}; ids of text are 0 to "
            f"{config.text.vocab_size - 1}"
        )
    if len(prompt.plans) > images:
        raise PromptError(
            f"the prompt has {len(prompt.plans)} images, this model was loaded to take {images}; "
            "send fewer, or raise images (a text-only checkpoint takes none at all)"
        )
    if config.vision is not None:
        grids = [plan.vit_grid for plan in prompt.plans]
        check_images(prompt.patches, grids, [len(span.order) for span in prompt.spans], config.vision)


def check_params(params: SamplingParams, prompt: Prompt, max_length: int, vocab_size: int, *, spelled: bool) -> None:
    """The answer has room, and its parameters fit this model; `spelled`: there is a tokenizer.

    Raises:
        PromptError: a parameter needs what is not there.
        CapacityError: the prompt leaves no room for a token.
    """
    if len(prompt) + (params.max_tokens != 0) > max_length:
        raise CapacityError(
            f"the prompt has {len(prompt)} tokens and leaves no room for an answer: the limit of prompt and answer "
            f"together is {max_length}; shorten it or raise max_length"
        )
    for name, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        outside = [token for token in tokens if token >= vocab_size]
        if outside:
            raise PromptError(f"{name} holds {outside[0]}; ids are 0 to {vocab_size - 1}")
    if params.stop and not spelled:
        raise PromptError("stop strings need a tokenizer, and this model folder has none; use stop_token_ids")
