"""Who sees whom around pictures (spec v4 6): read off from which logits move when one row's input moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spyglass.model import VisionLanguageModel
from spyglass.prompt.tokens import TokenKind
from tests.driver import Tokens, prefill
from tests.small_models import prompt_with_pictures, small_config, small_model

BEFORE, LEAD, CELLS, LEAD2, CELLS2, AFTER = 6, 3, 13, 2, 7, 14
MOVED = 5e-5  # regrouped sums move logits by a few 1e-6, an input that is seen moves them by at least 1e-3
PIECES = [BEFORE, (LEAD, CELLS), (LEAD2, CELLS2), AFTER]


@pytest.fixture(scope="module", params=[[0], [0, 4, 128, 4]], ids=["window only", "all kinds"])
def model(request: pytest.FixtureRequest) -> VisionLanguageModel:
    config = small_config(compress_ratios=request.param, num_hidden_layers=len(request.param))
    return small_model(seed=1, config=config)


def moved_rows(model: VisionLanguageModel, tokens: Tokens, row: int) -> set[int]:
    """Rows whose logits change when row `row` enters with another embedding."""
    changed = prompt_with_pictures(PIECES, model.config)
    if tokens.image_row_T[row] >= 0:
        assert changed.image_rows is not None
        changed.image_rows[tokens.image_row_T[row]] += 1.0
    else:
        changed.ids_T = tokens.ids_T.copy()
        changed.ids_T[row] = (tokens.ids_T[row] + 7) % model.config.text.vocab_size
    difference = (prefill(model, tokens) - prefill(model, changed)).abs().amax(dim=-1)
    return set(torch.nonzero(difference > MOVED).flatten().tolist())


def spans(tokens: Tokens) -> list[range]:
    starts = np.flatnonzero(tokens.kinds_T == TokenKind.START)
    ends = np.flatnonzero(tokens.kinds_T == TokenKind.END)
    return [range(int(s), int(e) + 1) for s, e in zip(starts, ends, strict=True)]


def test_a_cell_is_seen_by_its_whole_span_and_nothing_before(model: VisionLanguageModel) -> None:
    tokens = prompt_with_pictures(PIECES, model.config)
    for span in spans(tokens):
        cells = [row for row in span if tokens.image_row_T[row] >= 0]
        for cell in (cells[0], cells[-1]):
            moved = moved_rows(model, tokens, cell)
            assert moved >= set(span)
            assert min(moved) == span.start, "rows before START, leading pads included, must not see into the span"


def test_adjacent_pictures_do_not_see_each_other_backwards(model: VisionLanguageModel) -> None:
    tokens = prompt_with_pictures(PIECES, model.config)
    first, second = spans(tokens)
    cell = [row for row in second if tokens.image_row_T[row] >= 0][-1]
    assert not moved_rows(model, tokens, cell) & set(range(first.stop + LEAD2))


def test_text_is_causal_everywhere(model: VisionLanguageModel) -> None:
    tokens = prompt_with_pictures(PIECES, model.config)
    for row in (0, BEFORE - 1, spans(tokens)[1].stop, len(tokens) - 3):
        assert min(moved_rows(model, tokens, row)) == row


def test_an_in_span_row_still_sees_the_window_left_of_start() -> None:
    """One window-only layer: START + 3 reaches 8 back, over the leading pads into the text before."""
    config = small_config(compress_ratios=[0], num_hidden_layers=1)
    model = small_model(seed=1, config=config)
    tokens = prompt_with_pictures(PIECES, model.config)
    start = spans(tokens)[0].start
    row = BEFORE - 1  # LEAD pads behind it, then START
    seen_by = moved_rows(model, tokens, row)
    window = config.text.sliding_window
    assert seen_by == set(range(row, row + window))
    assert start + 3 in seen_by


def test_text_after_a_picture_sees_it_through_the_causal_window_only() -> None:
    config = small_config(compress_ratios=[0], num_hidden_layers=1)
    model = small_model(seed=1, config=config)
    tokens = prompt_with_pictures(PIECES, model.config)
    span = spans(tokens)[1]
    cell = [row for row in span if tokens.image_row_T[row] >= 0][-1]
    window = config.text.sliding_window
    assert moved_rows(model, tokens, cell) == set(span) | set(range(cell, cell + window))


def test_a_span_longer_than_the_window_sees_all_of_itself() -> None:
    config = small_config(compress_ratios=[0], num_hidden_layers=1)
    model = small_model(seed=1, config=config)
    tokens = prompt_with_pictures(PIECES, model.config)
    span = spans(tokens)[0]
    assert len(span) > config.text.sliding_window + 3
    cells = [row for row in span if tokens.image_row_T[row] >= 0]
    for cell in (cells[0], cells[-1]):
        assert moved_rows(model, tokens, cell) >= set(span)


def test_compressed_rows_stay_causal_for_picture_rows() -> None:
    """Without the window's in-span part, a row sees no entry that closes behind it: only compressed layers here, and a
    window of one row."""
    config = small_config(compress_ratios=[4], num_hidden_layers=1, sliding_window=1)
    model = small_model(seed=1, config=config)
    tokens = prompt_with_pictures([2, (1, 11), 9], model.config)
    changed = prompt_with_pictures([2, (1, 11), 9], model.config)
    tokens.visible_T2[:] = 0
    changed.visible_T2[:] = 0
    cell = int(np.flatnonzero(tokens.image_row_T >= 0)[5])
    assert changed.image_rows is not None
    changed.image_rows[tokens.image_row_T[cell]] += 1.0
    difference = (prefill(model, tokens) - prefill(model, changed)).abs().amax(dim=-1)
    moved = torch.nonzero(difference > MOVED).flatten().tolist()
    assert min(moved) == cell
    closing = cell // 4 * 4 + 3
    assert closing in moved, "the token that closes a group sees its entry at once"
    assert not set(range(cell + 1, closing)) & set(moved)
