"""Text of the tiny world, for building a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

from spyglass.tiny_world.cases import case_words
from spyglass.tiny_world.scene import STEP
from spyglass.tiny_world.words import PRINTED_WORDS, VARIANTS


def all_texts(num_cases: int = 20_000, seed: int = 0) -> Iterator[str]:
    """What is said in so many training cases, and in a quarter as many of each variant; then every printed word, digit
    and coordinate, so that all come up."""
    made = [case_words(seed, index) for index in range(num_cases)]
    made += [case_words(seed, index, variant=variant) for variant in VARIANTS for index in range(num_cases // 4)]
    for words in made:
        yield from words.turns
        yield from (text for text in (words.reasoning, words.answer) if text is not None)
    yield from PRINTED_WORDS
    yield from map(str, range(10))
    yield from (str(coordinate) for coordinate in range(0, 1000, STEP))
