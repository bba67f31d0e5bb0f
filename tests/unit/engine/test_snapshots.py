"""Snapshots: who goes on from one reads what the first one wrote, and nobody writes what another still reads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spyglass.engine.cache.allocator import CacheAllocator, Snapshot
from tests.engine_parts import PAGE_ROWS
from tests.unit.engine.test_allocator import TEXT, make_blocks, page_of, used

REACH = {"window": TEXT.sliding_window - 1, "state4": 8, "state128": 128}
RATIO = {"pool4": 4, "pool128": 128}


def rows_behind(place: int) -> Iterator[tuple[str, int]]:
    """(group, row) of everything that is needed to go on at a place (spec v4 4.4, 5.4)."""
    for group, reach in REACH.items():
        yield from ((group, row) for row in range(max(0, place - reach), place))
    for group, ratio in RATIO.items():
        yield from ((group, row) for row in range(place // ratio))


class Writer:
    """A sequence that writes its name and the row's number into every row, as a model would its values."""

    def __init__(self, blocks: CacheAllocator, name: int) -> None:
        row = blocks.admit()
        assert row is not None
        self.blocks, self.row, self.names, self.name, self.place = blocks, row, dict[tuple[str, int], int](), name, 0

    def step(self, stop: int, resumable: list[int]) -> dict[int, Snapshot]:
        one = np.array([self.row])
        self.blocks.allocate(one, np.array([self.place]), np.array([stop]), [(self.row, place) for place in resumable])
        written = {("window", row) for row in range(self.place, stop)}
        written |= {(group, row) for group, ratio in RATIO.items() for row in range(self.place // ratio, stop // ratio)}
        for end in (*resumable, stop):
            written |= {entry for entry in rows_behind(end) if entry[0] in REACH and entry[1] >= self.place}
        for group, row in written:
            self.names[group, row] = self.name
            self._at(group, row, value=1000.0 * self.name + row)
        snapshots = {place: self.blocks.snapshot(self.row, place) for place in resumable}
        self.blocks.release_expired(one, np.array([stop]))
        self.place = stop
        return snapshots

    def restored(self, snapshot: Snapshot, names: dict[tuple[str, int], int]) -> None:
        self.blocks.restore(self.row, snapshot)
        self.place, self.names = snapshot.tokens, dict(names)

    def check(self) -> None:
        for group, row in rows_behind(self.place):
            assert self._at(group, row) == {1000.0 * self.names[group, row] + row}, (group, row)

    def _at(self, group: str, row: int, value: float | None = None) -> set[float]:
        page = page_of(self.blocks, self.row, group, row)
        assert page >= 0, (group, row)
        seen = set()
        for tensor in self.blocks.memory.by_group[group].values():
            if value is not None:
                tensor[page, row % PAGE_ROWS[group]] = value
            seen |= set(tensor[page, row % PAGE_ROWS[group]].tolist())
        return seen


STEPS = st.lists(st.tuples(st.integers(1, 50), st.lists(st.integers(0, 49), max_size=2)), min_size=1, max_size=8)


@given(first=STEPS, then=STEPS, keep_first=st.booleans(), data=st.data())
def test_one_that_goes_on_from_a_snapshot_reads_and_leaves_what_the_first_wrote(
    first: list[tuple[int, list[int]]], then: list[tuple[int, list[int]]], keep_first: bool, data: st.DataObject
) -> None:
    blocks = make_blocks()
    a = Writer(blocks, 1)
    snapshots: dict[int, Snapshot] = {}
    for count, marks in first:
        places = sorted({a.place + 1 + mark % count for mark in marks} - set(snapshots))
        snapshots |= a.step(a.place + count, places)
    for number, (place, snapshot) in enumerate(snapshots.items()):
        assert snapshot.tokens == place
        if number > 1:
            blocks.forget(snapshot)
    if not keep_first:
        blocks.release(a.row)
    others = []
    for number, snapshot in enumerate(list(snapshots.values())[:2]):
        b = Writer(blocks, 2 + number)
        b.restored(snapshot, a.names)
        b.check()
        for count, _ in then:
            b.step(b.place + count, [])
            b.check()
        others.append(b)
    if keep_first:
        a.step(a.place + data.draw(st.integers(1, 50)), [])
        others.append(a)
    for one in others:
        one.check()
        blocks.release(one.row)
    for snapshot in list(snapshots.values())[:2]:
        again = Writer(blocks, 9)
        again.restored(snapshot, a.names)
        again.check()
        blocks.release(again.row)
        blocks.forget(snapshot)
    assert set(used(blocks).values()) == {0}


def test_full_pages_are_shared_and_the_page_that_grows_is_copied() -> None:
    blocks = make_blocks()
    a = Writer(blocks, 1)
    [snapshot] = a.step(4 * 3 * 5 + 4, [4 * 3 * 5 + 4]).values()  # five full pages of pool4 and one row of a sixth
    assert used(blocks)["pool4"] == 6
    b = Writer(blocks, 2)
    b.restored(snapshot, a.names)
    assert used(blocks)["pool4"] == 7
    assert [
        page_of(blocks, b.row, "pool4", row) == page_of(blocks, a.row, "pool4", row) for row in range(0, 16, 3)
    ] == [
        *[True] * 5,
        False,
    ]


def test_a_snapshot_of_rows_that_are_gone_is_our_own_bug() -> None:
    blocks = make_blocks()
    a = Writer(blocks, 1)
    a.step(40, [])
    a.step(80, [])
    with pytest.raises(AssertionError, match="have been taken back"):
        blocks.snapshot(a.row, 40)


def test_a_snapshot_counts_the_bytes_of_its_copies() -> None:
    blocks = make_blocks()
    [snapshot] = Writer(blocks, 1).step(40, [40]).values()
    row_bytes = {g.name: g.page_bytes // g.page_rows for g in blocks.groups}
    kept = {name: min(40, reach) for name, reach in REACH.items()}
    assert snapshot.row_bytes == sum(kept[name] * row_bytes[name] for name in REACH)
