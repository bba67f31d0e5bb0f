"""Who runs: within the budget, never through a span, nobody for ever last."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spyglass.config.cache import cache_plans
from spyglass.engine.blocks import Blocks
from spyglass.engine.request import SamplingParams
from spyglass.engine.scheduler import Scheduler
from spyglass.engine.sequence import Chunk, TokenSequence
from spyglass.errors import CapacityError
from spyglass.prompt.visibility import is_legal_cut
from tests.engine_parts import engine_config, make_prompt

CONFIG = engine_config()


def make_scheduler(step: int, sequences: int = 4) -> Scheduler:
    blocks = Blocks(
        cache_plans(CONFIG.text),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_sequences=sequences,
        step_tokens=step,
        max_length=4000,
    )
    return Scheduler(blocks, step)


def make_sequence(number: int, parts: list[int | tuple[int, int]], limit: int = 5) -> TokenSequence:
    prompt = make_prompt(CONFIG, parts, seed=number)
    return TokenSequence(number, prompt, SamplingParams(), limit=limit, seed=0, detokenizer=None)


def play(scheduler: Scheduler, chunks: list[Chunk]) -> None:
    """What the engine does with a step, without a model."""
    for chunk in chunks:
        draws = chunk.draws
        chunk.sequence.computed = chunk.stop
        if draws:
            chunk.sequence.append(7)
        if chunk.stop == len(chunk.sequence.prompt) + chunk.sequence.limit - 1 or not chunk.sequence.limit:
            scheduler.remove(chunk.sequence)


PARTS = st.lists(st.one_of(st.integers(1, 60), st.tuples(st.integers(1, 6), st.integers(1, 6))), min_size=1, max_size=5)


@given(shapes=st.lists(PARTS, min_size=1, max_size=8), step=st.integers(30, 90))
def test_steps_stay_in_budget_respect_spans_and_finish_everything(
    shapes: list[list[int | tuple[int, int]]], step: int
) -> None:
    scheduler = make_scheduler(step, sequences=3)
    sequences = [make_sequence(number, parts) for number, parts in enumerate(shapes)]
    for sequence in sequences:
        scheduler.add(sequence)
    total = sum(len(s.prompt) + s.limit - 1 for s in sequences)
    done = 0
    for _ in range(10_000):
        chunks = scheduler.schedule()
        if not chunks:
            break
        assert sum(chunk.stop - chunk.start for chunk in chunks) <= step
        assert len({chunk.sequence.request_id for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            assert chunk.start == chunk.sequence.computed < chunk.stop <= chunk.sequence.length
            assert chunk.stop >= len(chunk.sequence.prompt) or is_legal_cut(chunk.sequence.prompt, chunk.stop)
            done += chunk.stop - chunk.start
        play(scheduler, chunks)
    assert done == total
    assert scheduler.num_running == scheduler.num_waiting == 0


def test_a_cut_falls_before_start_or_behind_end_never_between() -> None:
    sequence = make_sequence(0, [10, (6, 6), 10])
    kinds = sequence.prompt.kinds_T
    start, end = int(np.flatnonzero(kinds == 0)[0]), int(np.flatnonzero(kinds == 4)[0])
    for place in range(sequence.length + 1):
        cut = sequence.cut_at_most(place)
        assert cut == (start if start < place <= end else place)
    assert sequence.longest_piece() == end - start + 1


def test_a_piece_longer_than_a_step_is_refused_with_the_number_it_needs() -> None:
    sequence = make_sequence(0, [3, (6, 6), 3])
    need = sequence.longest_piece()
    with pytest.raises(CapacityError, match=rf"max_step_tokens {need - 1}; raise it to at least {need}"):
        make_scheduler(need - 1).add(sequence)
    make_scheduler(need).add(sequence)


def test_answers_under_way_come_before_long_prompts() -> None:
    scheduler = make_scheduler(step=20)
    for number, parts in enumerate([[5], [400], [6]]):
        scheduler.add(make_sequence(number, parts, limit=50))
    play(scheduler, scheduler.schedule())  # 5 and 15 of the long one
    play(scheduler, scheduler.schedule())
    for _ in range(10):
        chunks = scheduler.schedule()
        sizes = {chunk.sequence.request_id: chunk.stop - chunk.start for chunk in chunks}
        assert sizes == {0: 1, 1: 18, 2: 1}
        play(scheduler, chunks)


def test_a_picture_that_never_fits_beside_the_answers_still_gets_its_turn() -> None:
    """The step holds the span exactly; answers under way would leave no room for it."""
    picture = make_sequence(9, [3, (6, 6), 3])
    scheduler = make_scheduler(step=picture.longest_piece())
    for number in range(3):
        scheduler.add(make_sequence(number, [2], limit=300))
    play(scheduler, scheduler.schedule())
    scheduler.add(picture)
    waited = dict.fromkeys(range(3), 0)
    for _ in range(8):
        chunks = scheduler.schedule()
        ran = {chunk.sequence.request_id for chunk in chunks}
        waited = {number: 0 if number in ran else count + 1 for number, count in waited.items()}
        assert max(waited.values()) <= 1, "an answer waits at most for the one step that the span fills"
        play(scheduler, chunks)
        if picture.computed >= len(picture.prompt) - 3:
            return
    raise AssertionError("the picture was never run")


def test_waiting_requests_are_admitted_in_order_as_rows_become_free() -> None:
    scheduler = make_scheduler(step=40, sequences=2)
    sequences = [make_sequence(number, [4], limit=3 + number) for number in range(5)]
    for sequence in sequences:
        scheduler.add(sequence)
    first_run: list[int] = []
    while chunks := scheduler.schedule():
        assert len(chunks) <= 2
        first_run += [c.sequence.request_id for c in chunks if c.sequence.request_id not in first_run]
        play(scheduler, chunks)
    assert first_run == [0, 1, 2, 3, 4]
