"""Steps beside answers under way: as long as they should be, by what steps took; nobody is left out."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spyglass.engine.scheduler import Scheduler
from spyglass.engine.sequence import Chunk, TokenSequence
from spyglass.engine.shares import Pace
from tests.engine_parts import make_engine, make_model, make_prompt, run_all
from tests.unit.engine.test_scheduler import CONFIG, PARTS, make_scheduler, make_sequence, play

TARGET_S = 0.1


class Clock:
    """A machine whose steps take what their work costs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, answers: float, token: float, cell: float) -> None:
        self.now, self.cost = 100.0, (answers, token, cell)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def run(self, pace: Pace, tokens: int, cells: int = 0, *, read: bool = True) -> float:
        """One step, and the seconds that it took."""
        answers, token, cell = self.cost
        began, seconds = self.now, answers + tokens * token + cells * cell
        self.now += seconds
        pace.ran(began, tokens, cells, read=read)
        return seconds


@pytest.mark.parametrize("token", [1e-5, 1e-4, 1e-3])
def test_prompts_are_cut_so_that_a_step_takes_as_long_as_it_should(
    token: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, pace = Clock(monkeypatch, answers=0.01, token=token, cell=2 * token), Pace(TARGET_S)
    clock.run(pace, 0)
    for _ in range(40):
        last = clock.run(pace, pace.prompt_tokens())
    assert last == pytest.approx(TARGET_S, rel=0.05)
    for _ in range(40):
        clock.run(pace, 100, 50)
    assert pace.cell_tokens == pytest.approx(2, rel=0.05)


def test_a_machine_that_becomes_slow_is_believed_at_once_and_one_measurement_is_not_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, pace = Clock(monkeypatch, answers=0.0, token=1e-4, cell=0.0), Pace(TARGET_S)
    for _ in range(10):
        clock.run(pace, 100)
    usual = pace.prompt_tokens()
    clock.cost = (0.0, 1e-3, 0.0)
    for _ in range(5):
        last = clock.run(pace, pace.prompt_tokens())
    assert last < 2 * TARGET_S
    clock.cost = (0.0, 1.0, 0.0)  # a kernel was compiled
    clock.run(pace, 100)
    clock.cost = (0.0, 1e-4, 0.0)
    for _ in range(40):
        clock.run(pace, pace.prompt_tokens())
    assert pace.prompt_tokens() > usual / 2


def test_where_answers_take_all_of_the_time_prompts_have_a_third_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch, answers=1.0, token=1e-3, cell=0.0), Pace(TARGET_S)
    for _ in range(40):
        clock.run(pace, 0)
        clock.run(pace, pace.prompt_tokens())
    assert pace.prompt_tokens() == pytest.approx(500, rel=0.05)


def test_what_a_device_is_still_at_is_measured_with_the_step_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, pace = Clock(monkeypatch, answers=0.0, token=1e-4, cell=0.0), Pace(TARGET_S)
    for _ in range(20):
        clock.run(pace, 300, read=False)
        clock.run(pace, 100)
    assert pace.prompt_tokens() == pytest.approx(TARGET_S / 1e-4, rel=0.01)


class Fixed(Pace):
    """Estimates that are known."""

    def __init__(self, tokens: int, cell: float) -> None:
        super().__init__(TARGET_S)
        self._fixed = tokens, cell

    def prompt_tokens(self, *, alone: bool = False) -> int:
        return self._fixed[0]

    @property
    def cell_tokens(self) -> float:
        return self._fixed[1]


def encode(scheduler: Scheduler, chunks: list[Chunk]) -> float:
    """What a step has for the tower, in rows; they are there afterwards."""
    needed = [(c.sequence, n) for c in chunks for n in c.sequence.new_images(c.start, c.stop)]
    needed += scheduler.encode_ahead
    for sequence, image in needed:
        sequence.image_rows[image] = None  # type: ignore[assignment]
    return sum(rows * columns for rows, columns in (s.prompt.plans[n].llm_grid for s, n in needed))


@given(
    shapes=st.lists(PARTS, min_size=2, max_size=6), tokens=st.integers(1, 60), cell=st.sampled_from([0.01, 1.0, 9.0])
)
def test_a_step_has_the_work_that_is_allowed_or_one_piece_and_everybody_ends(
    shapes: list[list[int | tuple[int, int]]], tokens: int, cell: float
) -> None:
    scheduler = make_scheduler(128, sequences=4)
    scheduler.pace = Fixed(tokens, cell)
    sequences = [make_sequence(number, parts, limit=20) for number, parts in enumerate(shapes)]
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(20_000):
        answers = [s for s in scheduler.running if s.pending == 1]
        if not (chunks := scheduler.schedule()):
            break
        prompts = [chunk for chunk in chunks if chunk.sequence.pending > 1]
        piece = max([chunk.stop - chunk.start for chunk in prompts], default=0)
        cells = encode(scheduler, chunks)
        assert {id(s) for s in answers if s.row is not None} <= {id(chunk.sequence) for chunk in chunks}
        work = sum(chunk.stop - chunk.start for chunk in prompts) + cell * cells
        ahead = len(scheduler.encode_ahead) == 1 and not prompts
        alone = len(prompts) == 1 and piece == pieces_of(prompts[0].sequence, prompts[0].start)
        assert work <= max(tokens, 2 * len(scheduler.running)) or ahead or (alone and not (cells and len(chunks) > 1))
        for chunk in chunks:
            if chunk.rows_wanted:
                chunk.sequence.answer.token_ids.append(7)
        play(scheduler, chunks)
    else:
        raise AssertionError("this comes to no end")
    assert not scheduler.num_waiting and not scheduler.num_running


def pieces_of(sequence: TokenSequence, start: int) -> int:
    """Tokens of the piece that begins at `start`."""
    computed, sequence.computed = sequence.computed, start
    piece, sequence.computed = sequence.next_piece(), computed
    return piece


def test_answers_do_not_depend_on_how_long_a_step_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    prompts = [make_prompt(CONFIG, parts, seed) for seed, parts in enumerate([[5], [90, (8, 8), 40], [(8, 4), 200]])]
    expected = run_all(make_engine(model, CONFIG, step=512), prompts)
    for tokens in (1, 17, 60):
        monkeypatch.setattr(Pace, "prompt_tokens", lambda self, alone, tokens=tokens: tokens)
        found = run_all(make_engine(model, CONFIG, step=512, step_milliseconds=1), prompts)
        assert [output.token_ids for output in found] == [output.token_ids for output in expected]
