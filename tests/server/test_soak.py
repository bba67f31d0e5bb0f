"""The short form of `make soak`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scripts.soak import MOST_GROWTH, growth, soak

SECONDS = 60.0


@pytest.mark.slow
def test_under_mixed_load_no_answer_is_lost_or_crossed_and_nothing_is_left_behind(tiny_folder: Path) -> None:
    tally, samples = asyncio.run(soak(tiny_folder, SECONDS))
    assert not tally.wrong, tally.wrong[:5]
    assert tally.seen["stream"] and tally.seen["whole"] and tally.seen["left"] and tally.seen["400"], tally.seen
    assert growth(samples) < MOST_GROWTH, samples
