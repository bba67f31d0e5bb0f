"""Several clients at one engine: what one asks moves no other's first token, shares hold, everybody finishes."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spyglass.engine.scheduler import Scheduler
from spyglass.engine.sequence import TokenSequence
from spyglass.engine.shares import ANYBODY, Client, Places, RecentUse, due_rows
from spyglass.errors import CapacityError
from tests.unit.engine.test_scheduler import PARTS, make_scheduler, make_sequence, play, steps_of

LOUD, QUIET = Client("loud"), Client("quiet")
STEPS, EVERY, WAITING = 1500, 30, 16


def ask(number: int, client: Client, parts: list[int | tuple[int, int]], limit: int) -> TokenSequence:
    sequence = make_sequence(number, parts, limit)
    sequence.client = client
    return sequence


def steps_to_first_token(scheduler: Scheduler, flood: Client | None, quiet: Client) -> list[int]:
    """Of each of the quiet client's requests, one every few steps: how many steps its first token takes."""
    draw, quietly, number = random.Random(1), random.Random(2), 0
    sent: dict[int, int] = {}
    took = []
    for clock in range(STEPS):
        while flood is not None and scheduler.num_waiting < WAITING:
            number += 1
            scheduler.add(ask(number, flood, [draw.randrange(1, 300)], draw.randrange(1, 80)))
        if clock % EVERY == 0:
            number += 1
            scheduler.add(ask(number, quiet, [quietly.randrange(1, 400)], quietly.randrange(1, 20)))
            sent[number] = clock
        chunks = scheduler.schedule()
        took += [clock - sent.pop(n) + 1 for c in chunks if c.rows_wanted and (n := c.sequence.request_id) in sent]
        play(scheduler, chunks)
    return took


@pytest.mark.parametrize("cache_bytes", [None, 1_100_000], ids=["memory for all", "memory for a few"])
def test_the_flood_of_one_client_moves_the_first_token_of_another_by_a_quarter_at_most(
    cache_bytes: int | None,
) -> None:
    def p99(flood: Client | None, quiet: Client) -> float:
        took = steps_to_first_token(make_scheduler(80, sequences=8, cache_bytes=cache_bytes), flood, quiet)
        assert len(took) >= STEPS // EVERY - 1 or flood == quiet, "not every request has been answered"
        return float(np.quantile(took, 0.99))

    alone = p99(None, QUIET)
    assert p99(LOUD, QUIET) <= 1.25 * alone
    assert p99(ANYBODY, ANYBODY) > 3 * alone, "without clients the same flood delays it, so the test can tell"


@pytest.mark.parametrize("share", [1, 3])
def test_clients_that_both_want_everything_get_their_shares(share: int) -> None:
    scheduler, draw, number = make_scheduler(80, sequences=8), random.Random(3), 0
    clients, ran = (LOUD, Client("other", share)), Counter[str]()
    for clock in range(2000):
        for client in clients:
            while sum(s.client == client for s in scheduler.waiting) < 8:
                number += 1
                scheduler.add(ask(number, client, [draw.randrange(1, 300)], draw.randrange(1, 40)))
        chunks = scheduler.schedule()
        if clock >= 500:
            for chunk in chunks:
                ran[chunk.sequence.client.name] += chunk.stop - chunk.start
        play(scheduler, chunks)
    assert 0.8 * share < ran["other"] / ran["loud"] < 1.25 * share


def test_a_client_alone_has_all_rows_and_gives_those_beyond_its_due_back_within_a_step() -> None:
    scheduler = make_scheduler(80, sequences=4)
    for number in range(6):
        scheduler.add(ask(number, LOUD, [4], 200))
    play(scheduler, scheduler.schedule())
    assert [s.client for s in scheduler.running] == [LOUD] * 4
    for number in range(6, 9):
        scheduler.add(ask(number, QUIET, [4], 200))
    play(scheduler, scheduler.schedule())
    assert Counter(s.client for s in scheduler.running) == {LOUD: 2, QUIET: 2} and scheduler.preemptions == 2
    for _ in range(50):
        play(scheduler, scheduler.schedule())
    assert scheduler.preemptions == 2, "nobody is displaced by whom it displaced"


ARRIVALS = st.lists(st.tuples(PARTS, st.integers(1, 100), st.integers(0, 2)), min_size=1, max_size=12)


@given(arrivals=ARRIVALS, cache_bytes=st.integers(645_000, 700_000), rows=st.integers(1, 6))
def test_whoever_asks_and_however_small_the_memory_everyone_finishes(
    arrivals: list[tuple[list[int | tuple[int, int]], int, int]], cache_bytes: int, rows: int
) -> None:
    scheduler = make_scheduler(50, sequences=rows, cache_bytes=cache_bytes)
    clients = (Client("a"), Client("b", 2), Client("c", 5))
    asked, done = [], set[int]()
    for number, (parts, limit, whose) in enumerate(arrivals):
        try:
            scheduler.add(ask(number, clients[whose], parts, limit))
        except CapacityError:
            continue
        asked.append(number)
    for chunks in steps_of(scheduler):
        before = {s.request_id for s in (*scheduler.running, *scheduler.waiting)}
        assert scheduler.running == sorted(scheduler.running, key=lambda s: s.request_id)
        play(scheduler, chunks)
        done |= before - {s.request_id for s in (*scheduler.running, *scheduler.waiting)}
    assert sorted(done) == asked
    assert {pool.num_used for pool in scheduler.allocator.pools.values()} == {0}


def test_use_is_per_share_and_forgotten() -> None:
    use = RecentUse()
    use.count({Client("a", 2): 100, QUIET: 100})
    assert use.of(Client("a", 2)) == 50 and use.of(QUIET) == 100 and use.of(LOUD) == 0
    for _ in range(1024):
        use.count({})
    assert use.of(QUIET) == pytest.approx(100 / np.e, rel=1e-2)


@pytest.mark.parametrize(
    ("shares", "rows", "due"), [((1,), 8, [8]), ((1, 1), 8, [4, 4]), ((3, 1), 8, [6, 2]), ((1, 9), 4, [1, 3])]
)
def test_rows_are_due_by_share_and_one_at_least(shares: tuple[int, ...], rows: int, due: list[int]) -> None:
    clients = [Client(str(number), share) for number, share in enumerate(shares)]
    assert list(due_rows(clients, rows).values()) == due


def test_a_client_that_takes_all_places_it_may_leaves_those_of_the_others() -> None:
    places = Places(16, (LOUD, QUIET))
    while places.has_room(LOUD):
        places.take(LOUD)
    assert places.num_taken == 12, "the half that is common, and half of the other half"
    assert places.has_room(QUIET, 4) and not places.has_room(QUIET, 5)
    places.take(QUIET, 4)
    places.take(LOUD, -12)
    assert places.has_room(QUIET, 8) and not places.has_room(QUIET, 9)
    single = Places(3, (QUIET,))
    single.take(QUIET, 3)
    assert not single.has_room(QUIET) and Places(3).has_room(ANYBODY, 3)
