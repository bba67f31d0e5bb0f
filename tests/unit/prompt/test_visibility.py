"""Who sees whom, against the set form of the rule; where prompts may be cut; which role sequences are refused."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from spyglass.config import ModelConfig
from spyglass.prompt import (
    ImageSpan,
    Patches,
    TokenKind,
    legal_cuts,
    prompt_from_parts,
    visible_extra,
    window_range,
)

TEXT, START, PAD, IMAGE, NEWLINE, END = (int(kind) for kind in TokenKind)
PARTS = st.lists(st.integers(0, 40) | st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6)


def kinds_of(values: list[int]) -> NDArray[np.int8]:
    return np.array(values, np.int8)


def patches(rows: int, columns: int) -> Patches:
    return Patches(np.zeros((rows * columns, 3, 14, 14), np.uint8), (rows, columns))


def parts_of(shape: list[int | tuple[int, int]]) -> list[list[int] | Patches]:
    return [[7] * part if isinstance(part, int) else patches(*part) for part in shape]


def bounds(span: ImageSpan) -> tuple[int, int]:
    """Positions of START and END."""
    return span.start + span.lead, span.start + span.length - 1


@given(shape=PARTS, window=st.integers(1, 140))
def test_a_key_is_seen_in_the_causal_window_or_from_the_same_span(
    v4: ModelConfig, shape: list[int | tuple[int, int]], window: int
) -> None:
    prompt = prompt_from_parts([[1], *parts_of(shape)], v4)
    position_T = np.arange(len(prompt))
    back_TT = position_T[:, None] - position_T
    seen_TT = (back_TT >= 0) & (back_TT < window)
    for first, last in map(bounds, prompt.spans):
        seen_TT[first : last + 1, first : last + 1] = True
    low_T, high_T = window_range(prompt.visible_T2, window)
    in_range_TT = (position_T >= low_T[:, None]) & (position_T <= high_T[:, None])
    np.testing.assert_array_equal(in_range_TT, seen_TT)


def test_leading_pads_are_outside_the_span(v4: ModelConfig) -> None:
    prompt = prompt_from_parts([[1] * 4, patches(6, 6)], v4)
    assert prompt.kinds_T[4:8].tolist() == [PAD, PAD, PAD, START]
    assert prompt.visible_T2[4:8].tolist() == [[0, 0], [0, 0], [0, 0], [0, 10 - 1]]
    assert prompt.visible_T2[-1].tolist() == [10 - 1, 0]


def test_v41_positions_are_causal_inside_a_picture_too(v41: ModelConfig) -> None:
    """A span [1900, 3948): position 1900 sees exactly 1773..1900, 1901 sees 1774..1901, nothing sees ahead."""
    grid = patches(93, 93)
    prompt = prompt_from_parts([[5] * 1900, grid, grid, [5]], v41)
    assert not prompt.visible_T2.any()
    low_T, high_T = window_range(prompt.visible_T2, 128)
    assert (low_T[1900], high_T[1900]) == (1773, 1900)
    assert (low_T[1901], high_T[1901]) == (1774, 1901)
    assert (high_T == np.arange(len(prompt))).all()


def test_a_stray_end_is_ignored_and_an_unclosed_start_reaches_to_the_end() -> None:
    stray = visible_extra(kinds_of([TEXT, END, TEXT, START, IMAGE, END, END, TEXT]), 384)
    assert stray.tolist() == [[0, 0], [0, 0], [0, 0], [0, 2], [1, 1], [2, 0], [0, 0], [0, 0]]
    unclosed = visible_extra(kinds_of([TEXT, START, IMAGE, TEXT]), 384)
    assert unclosed.tolist() == [[0, 0], [0, 2], [1, 1], [2, 0]]


def test_extra_visibility_is_capped_by_the_longest_block() -> None:
    kinds = kinds_of([START, *[IMAGE] * 8, END])
    capped = visible_extra(kinds, 5)
    assert capped[:, 0].tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 4, 4]
    assert capped[:, 1].tolist() == [5, 5, 5, 5, 5, 4, 3, 2, 1, 0]


@given(shape=PARTS)
def test_no_cut_falls_behind_a_start_and_not_behind_its_end(
    v4: ModelConfig, v41: ModelConfig, shape: list[int | tuple[int, int]]
) -> None:
    prompt = prompt_from_parts([[1], *parts_of(shape)], v4)
    cuts = np.ones(len(prompt) + 1, bool)
    for first, last in map(bounds, prompt.spans):
        cuts[first + 1 : last + 1] = False
    np.testing.assert_array_equal(legal_cuts(prompt), cuts)
    assert legal_cuts(prompt_from_parts([[1], *parts_of(shape)], v41)).all()
