"""Training samples over small random models: runs of text and images, with every text token to be learned."""

from __future__ import annotations

from collections.abc import Sequence

from spyglass.config.model import ModelConfig
from spyglass.prompt.build import prompt_from_parts
from spyglass.train.packing import Sample
from tests.engine_parts import patches
from tests.small_models import random_text

Parts = Sequence[int | tuple[int, int]]
MIXED: tuple[Parts, ...] = ([21], [3, (3, 5), 9], [150], [2, (2, 2), 4, (5, 3), 6], [1, (4, 4), 5])


def make_sample(config: ModelConfig, parts: Parts, seed: int = 0, vocab_size: int = 68) -> Sample:
    """Runs of random text (a number of tokens) and random images (patch rows, columns), in order."""
    assert config.vision is not None
    pieces = [
        random_text(part, seed + number, vocab_size).tolist()
        if isinstance(part, int)
        else patches(*part, seed=seed + number, patch=config.vision.patch_size)
        for number, part in enumerate(parts)
    ]
    prompt = prompt_from_parts(pieces, config)
    learn_T = prompt.ids_T >= 0
    learn_T[0] = False
    return Sample(prompt=prompt, learn_T=learn_T)


def make_samples(config: ModelConfig, mixed: Sequence[Parts] = MIXED) -> list[Sample]:
    return [make_sample(config, parts, seed=10 * number) for number, parts in enumerate(mixed)]
