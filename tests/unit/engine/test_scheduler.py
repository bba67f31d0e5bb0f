"""Who runs: within the budget, never through a span, nobody for ever last."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spyglass.config.cache import cache_plans
from spyglass.engine.cache.allocator import CacheAllocator
from spyglass.engine.cache.prefix import PrefixCache
from spyglass.engine.request import SamplingParams
from spyglass.engine.scheduler import Scheduler, StuckError
from spyglass.engine.sequence import Answer, Chunk, Request, TokenSequence
from spyglass.engine.shares import Pace
from spyglass.errors import CapacityError
from spyglass.prompt.visibility import legal_cuts
from tests.engine_parts import PAGE_ROWS, engine_config, make_prompt

CONFIG = engine_config()


def make_scheduler(
    step: int, sequences: int = 4, cache_bytes: int | None = None, pace: Pace | None = None
) -> Scheduler:
    blocks = CacheAllocator(
        cache_plans(CONFIG.text),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_sequences=sequences,
        step_tokens=step,
        max_length=4000,
        cache_bytes=cache_bytes,
        page_rows=PAGE_ROWS,
    )
    return Scheduler(blocks, step, PrefixCache(blocks, 0), pace)


def make_sequence(number: int, parts: list[int | tuple[int, int]], limit: int = 5) -> TokenSequence:
    request = Request(prompt=make_prompt(CONFIG, parts, seed=number), params=SamplingParams())
    return TokenSequence(number, request, Answer(request, limit=limit))


def play(scheduler: Scheduler, chunks: list[Chunk]) -> None:
    """What the engine does with a step, without a model."""
    for chunk in chunks:
        chunk.sequence.computed = chunk.stop
        if chunk.rows_wanted:
            chunk.sequence.expect()
            chunk.sequence.resolve(7)
        limit = chunk.sequence.answer.limit
        if chunk.stop == len(chunk.sequence.prompt) + limit - 1 or not limit:
            scheduler.remove(chunk.sequence)


def steps_of(scheduler: Scheduler) -> Iterator[list[Chunk]]:
    """Steps until there is nothing to do."""
    for _ in range(5000):
        if not (chunks := scheduler.schedule()):
            return
        yield chunks
    raise AssertionError("this comes to no end")


PARTS = st.lists(st.one_of(st.integers(1, 60), st.tuples(st.integers(1, 6), st.integers(1, 6))), min_size=1, max_size=5)


@given(shapes=st.lists(PARTS, min_size=1, max_size=8), step=st.integers(30, 90))
def test_steps_stay_in_budget_respect_spans_and_finish_everything(
    shapes: list[list[int | tuple[int, int]]], step: int
) -> None:
    scheduler = make_scheduler(step, sequences=3)
    sequences = [make_sequence(number, parts) for number, parts in enumerate(shapes)]
    for sequence in sequences:
        scheduler.add(sequence)
    total = sum(len(s.prompt) + s.answer.limit - 1 for s in sequences)
    done = 0
    for _ in range(10_000):
        chunks = scheduler.schedule()
        if not chunks:
            break
        assert sum(chunk.stop - chunk.start for chunk in chunks) <= step
        assert len({chunk.sequence.request_id for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            assert chunk.start == chunk.sequence.computed < chunk.stop <= chunk.sequence.length
            assert chunk.stop >= len(chunk.sequence.prompt) or legal_cuts(chunk.sequence.prompt)[chunk.stop]
            done += chunk.stop - chunk.start
        play(scheduler, chunks)
    assert done == total
    assert scheduler.num_running == scheduler.num_waiting == 0


def test_a_cut_falls_before_start_or_behind_end_never_between() -> None:
    sequence = make_sequence(0, [10, (6, 6), 10])
    kinds = sequence.prompt.kinds_T
    start, end = int(np.flatnonzero(kinds == 0)[0]), int(np.flatnonzero(kinds == 4)[0])
    for place in range(sequence.length + 1):
        cut = sequence.last_cut(place)
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
    for _ in range(4):
        play(scheduler, scheduler.schedule())
    for _ in range(10):
        chunks = scheduler.schedule()
        sizes = {chunk.sequence.request_id: chunk.stop - chunk.start for chunk in chunks}
        assert sizes == {0: 1, 1: 18, 2: 1}
        play(scheduler, chunks)


def test_more_answers_under_way_than_a_step_has_tokens_take_turns() -> None:
    scheduler = make_scheduler(4, sequences=6)
    sequences = [make_sequence(number, [1], limit=9) for number in range(6)]
    for sequence in sequences:
        scheduler.add(sequence)
    before = set(range(6))
    for chunks in steps_of(scheduler):
        assert [chunk.stop - chunk.start for chunk in chunks] == [1] * min(4, scheduler.num_running)
        served = {chunk.sequence.request_id for chunk in chunks}
        assert {s.request_id for s in sequences if s.row is not None} <= before | served
        before = served
        play(scheduler, chunks)
    assert all(sequence.row is None for sequence in sequences)


def test_half_a_step_is_shared_alike_and_the_rest_goes_to_the_longest_waiting() -> None:
    scheduler = make_scheduler(step=40)
    for number in range(4):
        scheduler.add(make_sequence(number, [200]))
    sizes = [chunk.stop - chunk.start for chunk in scheduler.schedule()]
    assert sizes == [25, 5, 5, 5]


class Watch:
    """Plays requests that arrive over time, and notes for how many steps in a row each admitted one got nothing."""

    def __init__(self, scheduler: Scheduler, rows: int) -> None:
        self.scheduler, self.rows = scheduler, rows
        self.held_back = self.kept_out = False
        self.skipped: dict[int, int] = {}
        self.finished: list[int] = []

    def step(self, arrivals: list[TokenSequence]) -> bool:
        """One step; whether anything ran."""
        for sequence in arrivals:
            self.scheduler.add(sequence)
        chunks = self.scheduler.schedule()
        ran = {chunk.sequence.request_id for chunk in chunks}
        running = {sequence.request_id for sequence in self.scheduler.running}
        self.held_back = bool(self.scheduler.num_waiting) and len(running) < self.rows
        self.kept_out = self.head_would_fit_without_guests()
        self.skipped = {n: 0 if n in ran else self.skipped.get(n, 0) + 1 for n in running}
        play(self.scheduler, chunks)
        self.finished += sorted(running - {sequence.request_id for sequence in self.scheduler.running})
        return bool(chunks)

    def head_would_fit_without_guests(self) -> bool:
        """Whether the first of the queue could run if only those older than it did."""
        if not self.scheduler.num_waiting:
            return False
        head = self.scheduler.waiting[0]
        older = [s for s in self.scheduler.running if s.request_id < head.request_id]
        room = self.scheduler.allocator.has_room([s.length + 64 for s in (*older, head)])
        return not older or (len(older) < self.rows and room)


ARRIVALS = st.lists(st.tuples(st.integers(0, 6), PARTS, st.integers(1, 30)), min_size=1, max_size=14)


@given(arrivals=ARRIVALS, step=st.integers(45, 90))
def test_text_and_answers_never_wait_two_steps_and_pictures_get_their_turn(
    arrivals: list[tuple[int, list[int | tuple[int, int]], int]], step: int
) -> None:
    """The laws of the scheduler's docstring, with memory for all: 6 table rows, steps of at least twice that."""
    watch = Watch(make_scheduler(step, sequences=6), rows=6)
    sequences = [make_sequence(number, parts, limit) for number, (_, parts, limit) in enumerate(arrivals)]
    text = {s.request_id for s in sequences if not s.prompt.spans}
    due = np.cumsum([gap for gap, _, _ in arrivals]).tolist()
    for clock in range(5000):
        before = {s.request_id for s in watch.scheduler.running if s.next_piece() == 1}
        ran = watch.step([s for s, at in zip(sequences, due, strict=True) if at == clock])
        for number, steps in watch.skipped.items():
            if number in text or number in before:
                assert steps <= 1
            assert steps <= 2 * 6, "a picture waits at most for one picture of each other, every second step"
        assert not watch.held_back, "a free row and memory, yet waiting"
        if clock > due[-1] and not ran:
            break
    assert sorted(watch.finished) == list(range(len(sequences)))


@given(arrivals=ARRIVALS, cache_bytes=st.integers(645_000, 670_000))
def test_however_small_the_memory_everyone_finishes_and_the_oldest_is_never_preempted(
    arrivals: list[tuple[int, list[int | tuple[int, int]], int]], cache_bytes: int
) -> None:
    scheduler = make_scheduler(50, sequences=6, cache_bytes=cache_bytes)
    watch = Watch(scheduler, rows=6)
    sequences = []
    for number, (_, parts, limit) in enumerate(arrivals):
        sequence = make_sequence(number, parts, 4 * limit)
        try:
            scheduler.add(sequence)
        except CapacityError:
            continue
        sequences.append(sequence)
    for _ in range(20_000):
        all_there = (*scheduler.running, *scheduler.waiting)
        oldest = min(all_there, key=lambda s: s.request_id, default=None)
        computed = 0 if oldest is None else oldest.computed
        if not watch.step([]):
            break
        if oldest is not None and oldest.request_id not in watch.finished:
            assert oldest.row is not None and oldest.computed >= computed
        for queue in (scheduler.running, scheduler.waiting):
            assert queue == sorted(queue, key=lambda s: s.request_id), "the order of arrival is kept"
        assert not watch.kept_out, "nobody is kept out by who came later"
    assert sorted(watch.finished) == [s.request_id for s in sequences]
    assert {pool.num_used for pool in scheduler.allocator.pools.values()} == {0}


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


def test_pictures_that_fill_a_step_take_turns_and_text_and_answers_come_every_second_step() -> None:
    pictures = [make_sequence(number, [(6, 6)] * 6) for number in range(3)]
    scheduler = make_scheduler(step=pictures[0].longest_piece(), sequences=5)
    for sequence in [*pictures, make_sequence(3, [2], limit=300), make_sequence(4, [300])]:
        scheduler.add(sequence)
    waited = dict.fromkeys(range(5), 0)
    for _ in range(30):
        chunks = scheduler.schedule()
        ran = {chunk.sequence.request_id for chunk in chunks}
        waited = {number: 0 if number in ran else count + 1 for number, count in waited.items()}
        assert max(waited[3], waited[4]) <= 1
        assert max(waited[number] for number in range(3)) < 2 * 3
        play(scheduler, chunks)


def test_waiting_requests_are_admitted_in_order_as_rows_become_free() -> None:
    scheduler = make_scheduler(step=40, sequences=2)
    sequences = [make_sequence(number, [4], limit=3 + number) for number in range(5)]
    for sequence in sequences:
        scheduler.add(sequence)
    first_run: list[int] = []
    for chunks in steps_of(scheduler):
        assert len(chunks) <= 2
        first_run += [c.sequence.request_id for c in chunks if c.sequence.request_id not in first_run]
        play(scheduler, chunks)
    assert first_run == [0, 1, 2, 3, 4]


def test_a_small_text_passes_a_head_that_lacks_memory() -> None:
    scheduler = make_scheduler(50, sequences=4, cache_bytes=510_000)
    for number, (length, limit) in enumerate([(100, 160), (250, 5), (4, 3)]):
        scheduler.add(make_sequence(number, [length], limit))
    admitted: list[list[int]] = []
    for chunks in steps_of(scheduler):
        admitted.append([sequence.request_id for sequence in scheduler.running])
        play(scheduler, chunks)
    assert admitted[:3] == [[0, 2]] * 3, "it runs at once, not when the first has ended 162 steps later"
    assert admitted[3:162] == [[0]] * 159, "rows are free, but not the memory that the second one needs"
    assert admitted[162] == [1], "in the first step after the one that held the memory has ended"
    assert scheduler.preemptions == 0


@pytest.mark.parametrize("limit", [1, 30, 70])
def test_a_stream_of_small_ones_does_not_delay_the_head_by_a_step(limit: int) -> None:
    """As many as there is room for run at any time, and all of them give way when the head's turn has come."""
    scheduler = make_scheduler(50, sequences=4, cache_bytes=510_000)
    for number, parts in enumerate([[100], [330]]):
        scheduler.add(make_sequence(number, parts, limit=160 if number == 0 else 40))
    for step in range(162):
        if step > 1:  # the first prompt has been read: an answer under way shares its steps with nobody
            scheduler.add(make_sequence(step, [4], limit))
        chunks = scheduler.schedule()
        running = [sequence.request_id for sequence in scheduler.running]
        assert (1 in running) == (step == 161), "it would be admitted in this step if nobody else had come"
        assert step in (0, 1, 161) or (running[0] == 0 and len(running) > 1)
        play(scheduler, chunks)
    assert scheduler.preemptions == (limit > 1), "of the guests, only who was in the way has given way"


def test_a_head_takes_the_row_of_a_guest() -> None:
    """Beside 0 there is room for neither 1 nor 2; they fit together, but 3 has the second of two rows."""
    scheduler = make_scheduler(50, sequences=2, cache_bytes=336_000)
    for number, (length, limit) in enumerate([(150, 20), (90, 5), (60, 5), (4, 90)]):
        scheduler.add(make_sequence(number, [length], limit))
    seen: list[list[int]] = []
    for chunks in steps_of(scheduler):
        running = [sequence.request_id for sequence in scheduler.running]
        seen += [running] if running not in seen else []
        play(scheduler, chunks)
    assert seen == [[0, 3], [1, 2], [3]]
    assert scheduler.preemptions == 1


def test_a_preemption_makes_room_for_who_fits() -> None:
    scheduler = make_scheduler(50, sequences=2, cache_bytes=351_000)
    for number, (length, limit) in enumerate([(100, 180), (100, 180), (4, 3)]):
        scheduler.add(make_sequence(number, [length], limit))
    seen: list[list[int]] = []
    for chunks in steps_of(scheduler):
        seen.append([chunk.sequence.request_id for chunk in chunks])
        play(scheduler, chunks)
    place = seen.index([0])
    assert seen[place - 1 : place + 4] == [[0, 1], [0], [0, 2], [0, 2], [0, 2]], "the small one takes the row at once"


def test_who_was_preempted_is_not_admitted_again_before_all_have_room_to_grow() -> None:
    """Else two requests would take each other's pages in turn, and run their prompts for ever."""
    scheduler = make_scheduler(50, sequences=2, cache_bytes=351_000)
    for number in range(2):
        scheduler.add(make_sequence(number, [100], limit=180))
    since, gaps = 0, []
    for chunks in steps_of(scheduler):
        since += 1
        if scheduler.preemptions > len(gaps):
            gaps.append(since)
            since = 0
        play(scheduler, chunks)
    assert 1 <= len(gaps) <= 2
    assert min(gaps) > 60


def test_memory_that_was_promised_and_is_not_there_is_an_error_and_no_endless_search() -> None:
    scheduler = make_scheduler(step=40, cache_bytes=660_000)
    sequence = make_sequence(0, [60])
    scheduler.add(sequence)
    for pool in scheduler.allocator.pools.values():
        pool.take(pool.num_free)  # somebody keeps pages and belongs to nobody
    with pytest.raises(StuckError, match="promised") as raised:
        scheduler.schedule()
    assert raised.value.sequences == (sequence,)
