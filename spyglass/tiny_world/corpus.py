"""Text of the tiny world, for building a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from spyglass.tiny_world.cases import case_texts
from spyglass.tiny_world.scene import STEP
from spyglass.tiny_world.words import PRINTED_WORDS, VARIANTS


def all_texts(num_cases: int = 20_000, seed: int = 0) -> Iterator[str]:
    """What is said in so many training cases, and in a quarter as many of each variant; every printed word, digit and
    coordinate comes up."""
    plain = (case_texts(seed, index) for index in range(num_cases))
    varied = (case_texts(seed, index, variant=variant) for variant in VARIANTS for index in range(num_cases // 4))
    yield from chain.from_iterable(chain(plain, varied))
    yield from PRINTED_WORDS
    yield from map(str, range(10))
    yield from (str(coordinate) for coordinate in range(0, 1000, STEP))
