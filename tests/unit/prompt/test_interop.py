"""The id conventions of other engines, written and read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spyglass.config import ModelConfig
from spyglass.errors import PromptError
from spyglass.prompt import (
    Patches,
    TokenKind,
    kinds_of_reference_ids,
    prompt_from_parts,
    prompt_from_reference_ids,
    to_reference_ids,
    to_v41_ids,
    to_vllm_ids,
)

VOCABULARY = 129280


def patches(rows: int, columns: int) -> Patches:
    return Patches(np.zeros((rows * columns, 3, 14, 14), np.uint8), (rows, columns))


def test_reference_ids_are_vocabulary_size_plus_role(v4: ModelConfig) -> None:
    prompt = prompt_from_parts([[5] * 7, patches(6, 6), [9]], v4)
    roles = [0, 2, 2, 2, 2, 3, 3, 1, 1, 4]
    assert to_reference_ids(prompt, VOCABULARY).tolist() == [5] * 7 + [VOCABULARY + role for role in roles] + [9]
    assert to_vllm_ids(prompt).tolist() == [5] * 7 + [129257 + role for role in roles] + [9]
    assert max(to_reference_ids(prompt, VOCABULARY)) == 129284
    assert max(to_vllm_ids(prompt)) == 129261


def test_v41_ids_are_the_placeholder_with_types(v41: ModelConfig) -> None:
    prompt = prompt_from_parts([[5], patches(4, 6), [9]], v41)
    ids, types = to_v41_ids(prompt, 129264)
    assert ids.tolist() == [5] + [129264] * 8 + [9]
    assert types.tolist() == [-1, 0, 1, 1, 2, 1, 1, 2, 3, -1]


def test_v4_blocks_have_no_v41_form(v4: ModelConfig) -> None:
    with pytest.raises(PromptError, match="V4 picture blocks with pads"):
        to_v41_ids(prompt_from_parts([[5], patches(4, 6)], v4), 129264)


@given(shape=st.lists(st.integers(1, 9) | st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6))
def test_reference_ids_read_back_are_the_same_prompt(v4: ModelConfig, shape: list[int | tuple[int, int]]) -> None:
    pictures = [patches(*part) for part in shape if not isinstance(part, int)]
    given_parts = iter(pictures)
    prompt = prompt_from_parts([[7] * part if isinstance(part, int) else next(given_parts) for part in shape], v4)
    written = to_reference_ids(prompt, VOCABULARY)
    read = prompt_from_reference_ids(written.tolist(), pictures, v4)
    for name in ("ids_T", "kinds_T", "image_row_T", "visible_T2"):
        np.testing.assert_array_equal(getattr(read, name), getattr(prompt, name))
    ids, kinds = kinds_of_reference_ids(written, VOCABULARY)
    np.testing.assert_array_equal(ids, prompt.ids_T)
    np.testing.assert_array_equal(kinds, prompt.kinds_T)


def block(start: int, config: ModelConfig) -> list[int]:
    ids: list[int] = to_reference_ids(prompt_from_parts([[5] * start, patches(6, 6)], config), VOCABULARY).tolist()
    return ids


def test_malformed_reference_ids_are_refused(v4: ModelConfig) -> None:
    good = block(3, v4)
    one = [patches(6, 6)]
    role = {kind.name: VOCABULARY + kind for kind in TokenKind}
    assert len(prompt_from_reference_ids(good, one, v4)) == 13
    for ids, pictures, message in (
        (good[:-1], one, "START at position 3 has no END"),
        ([5, role["END"], *good], one, "END at position 1 closes nothing"),
        ([*good, role["IMAGE"]], one, "IMAGE at position 13 lies outside"),
        ([role["START"], *good], one, "the span at 0 is still open"),
        ([*good[:5], 5, *good[5:]], one, "has text in it"),
        ([*good, VOCABULARY + 5], one, "id 129285 at position 13 is neither a token"),
        ([*good, -1], one, "id -1 at position 13 is neither"),
        (good, [], "hold 1 picture blocks, 0 pictures"),
        (good, one * 2, "hold 1 picture blocks, 2 pictures"),
        (good, [patches(6, 9)], "they part at position"),
        (good[1:], one, "they part at position 2"),  # START no longer stands at 3 modulo 4
        ([*good, role["PAD"]], one, "they part at position 13"),
        ([[5]], [], "must be a flat list"),
        ([5.0], [], "must be a flat list"),
    ):
        with pytest.raises(PromptError, match=message):
            prompt_from_reference_ids(ids, pictures, v4)
