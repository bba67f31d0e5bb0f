"""Pages: nobody shares one, kept rows stay where they are, rows behind the retention go back, nothing leaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spyglass.config.cache import cache_plans
from spyglass.engine.cache.allocator import CacheAllocator
from spyglass.errors import CapacityError
from tests.engine_parts import PAGE_ROWS
from tests.small_models import small_config

TEXT = small_config().text
STEP = 50


def make_blocks(**options: Any) -> CacheAllocator:
    settings: dict[str, Any] = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "max_sequences": 4,
        "step_tokens": STEP,
        "max_length": 2000,
        "page_rows": PAGE_ROWS,
        "fill": float("nan"),
    }
    return CacheAllocator(cache_plans(TEXT), **(settings | options))


def step(blocks: CacheAllocator, rows: list[int], start: list[int], stop: list[int]) -> None:
    arrays = [np.array(values, np.int64) for values in (rows, start, stop)]
    blocks.allocate(*arrays)


def reserve(blocks: CacheAllocator, row: int | None, tokens: int) -> bool:
    assert row is not None
    return blocks.reserve(np.array([row]), np.array([tokens]))


def settle(blocks: CacheAllocator, rows: list[int], stop: list[int]) -> None:
    blocks.release_expired(np.array(rows, np.int64), np.array(stop, np.int64))


def page_of(blocks: CacheAllocator, row: int, group: str, number: int) -> int:
    """Page of a group's row `number`, by CacheView's rule."""
    table = blocks.table_rows(np.array([row]))[group][0]
    return int(table[(number // PAGE_ROWS[group]) % len(table)])


def used(blocks: CacheAllocator) -> dict[str, int]:
    return {name: pool.num_used for name, pool in blocks.pools.items()}


def needed(start: int, stop: int) -> dict[str, set[int]]:
    """Rows that a step over [start, stop) reads or writes, by group (spec v4 4.4, 5.4)."""
    rows = {"window": set(range(max(0, start - TEXT.sliding_window + 1), stop))}
    for ratio, reach in ((4, 8), (128, 128)):
        rows[f"pool{ratio}"] = set(range(stop // ratio))
        carried = set(range(max(0, start - reach), start))
        rows[f"state{ratio}"] = carried | set(range(max(start, stop - reach), stop))
    return rows


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, STEP)), min_size=1, max_size=40))
def test_every_needed_row_has_a_page_of_its_own_that_stays(moves: list[tuple[int, int]]) -> None:
    blocks = make_blocks()
    rows = [blocks.admit() for _ in range(3)]
    place = [0, 0, 0]
    held: dict[tuple[int, str, int], int] = {}
    for who, count in moves:
        row = rows[who]
        assert row is not None
        start, stop = place[who], place[who] + count
        step(blocks, [row], [start], [stop])
        owners: dict[tuple[str, int], tuple[int, int]] = {}
        for group, numbers in needed(start, stop).items():
            for number in numbers:
                page = page_of(blocks, row, group, number)
                assert page >= 0
                assert held.get((who, group, number), page) == page, "a kept row moved"
                held[who, group, number] = page
                assert owners.setdefault((group, page), (who, number // PAGE_ROWS[group]))[0] == who
        settle(blocks, [row], [stop])
        place[who] = stop
        held = {key: page for key, page in held.items() if key[0] != who or key[2] in needed(stop, stop)[key[1]]}
    for group in PAGE_ROWS:
        pages = blocks.table_rows(np.array(rows))[group]
        pages = pages[pages >= 0]
        assert len(np.unique(pages)) == len(pages) == used(blocks)[group]
    for row in rows:
        assert row is not None
        blocks.release(row)
    assert set(used(blocks).values()) == {0}


def test_pages_behind_the_window_go_back_while_a_sequence_grows() -> None:
    blocks = make_blocks()
    row = blocks.admit()
    assert row is not None
    most: dict[str, int] = {}
    for start in range(0, 1000, 10):
        step(blocks, [row], [start], [start + 10])
        settle(blocks, [row], [start + 10])
        most = {name: max(count, most.get(name, 0)) for name, count in used(blocks).items()}
    assert most["window"] <= -(-(TEXT.sliding_window - 1) // PAGE_ROWS["window"]) + 1
    assert most["state4"] <= -(-8 // PAGE_ROWS["state4"]) + 1
    assert most["state128"] <= -(-128 // PAGE_ROWS["state128"]) + 1
    assert used(blocks)["pool4"] == -(-(1000 // 4) // PAGE_ROWS["pool4"])
    assert used(blocks)["pool128"] == 1000 // 128


def test_a_long_step_takes_state_pages_only_for_rows_that_stay() -> None:
    blocks = make_blocks(step_tokens=1500)
    row = blocks.admit()
    assert row is not None
    step(blocks, [row], [0], [1500])
    assert used(blocks)["state4"] == -(-8 // PAGE_ROWS["state4"])
    assert used(blocks)["state128"] <= -(-128 // PAGE_ROWS["state128"]) + 1
    assert used(blocks)["window"] == 1500 // PAGE_ROWS["window"]


def test_growing_keeps_what_was_written() -> None:
    blocks = make_blocks(fill=None)
    row = blocks.admit()
    assert row is not None
    step(blocks, [row], [0], [20])
    key = ("pool", 1)
    blocks.pages[key].normal_()
    before = blocks.pages[key].clone()
    step(blocks, [row], [20], [70])
    after = blocks.pages[key]
    assert len(after) > len(before)
    assert torch.equal(after[: len(before)], before)


def test_returned_pages_are_poisoned_when_asked() -> None:
    blocks = make_blocks()
    row = blocks.admit()
    assert row is not None
    step(blocks, [row], [0], [40])
    for pages in blocks.pages.values():
        pages.zero_()
    blocks.release(row)
    assert all(pages.isnan().any() for pages in blocks.pages.values() if len(pages))


def test_a_fixed_memory_stays_within_its_bytes_and_gives_out_only_what_it_has() -> None:
    budget = 620_000
    blocks = make_blocks(cache_bytes=budget)
    before = blocks.bytes_allocated
    assert budget * 0.9 < before <= budget
    rows = [blocks.admit() for _ in range(4)]
    longest = blocks.max_tokens_alone
    assert longest is not None and 900 < longest < 2000
    ends = []
    for row in rows:
        assert row is not None
        place = 0
        while place < 900 and reserve(blocks, row, place + STEP):
            step(blocks, [row], [place], [place + STEP])
            settle(blocks, [row], [place + STEP])
            place += STEP
        ends.append(place)
    assert ends[0] == 900 and 0 < sum(ends[1:]) < longest and ends[-1] < 900
    assert blocks.bytes_allocated == before
    held = used(blocks)
    assert not reserve(blocks, rows[-1], ends[-1] + STEP)
    assert used(blocks) == held, "a refused reservation takes nothing"
    assert (
        max(blocks.pools[name].num_free for name in ("pool4", "pool128")) >= 0
        and blocks.share_used(dict.fromkeys(blocks.pools, 0)) == 1.0
    )
    blocks.release(rows[0] or 0)
    assert reserve(blocks, rows[-1], ends[-1] + STEP)


def test_the_longest_sequence_fits_and_one_token_more_does_not() -> None:
    blocks = make_blocks(cache_bytes=620_000)
    longest = blocks.max_tokens_alone
    assert longest is not None
    row = blocks.admit()
    assert row is not None
    blocks.refuse_if_never(longest)
    assert not reserve(blocks, row, longest + 1)
    assert reserve(blocks, row, longest)
    with pytest.raises(CapacityError, match=f"{longest + 1} tokens needs .* enough for {longest} tokens"):
        blocks.refuse_if_never(longest + 1)
    assert make_blocks().max_tokens_alone is None


def test_room_for_several_is_room_for_their_pages() -> None:
    blocks = make_blocks(cache_bytes=620_000)
    limits = {name: blocks.pools[name].limit or 0 for name in ("pool4", "pool128")}
    for tokens in ([300], [300, 300], [400, 500], [100] * 4, [900, 10], [2000], [800, 800]):
        pages = {r: [-(-(count // r) // PAGE_ROWS[f"pool{r}"]) for count in tokens] for r in (4, 128)}
        assert blocks.has_room(tokens) == all(sum(pages[r]) <= limits[f"pool{r}"] for r in (4, 128))
    assert blocks.has_room([300, 300]) and not blocks.has_room([800, 800])
    assert make_blocks().has_room([10**6] * 4)


def test_sequences_that_all_step_at_once_fit_the_rings_of_a_fixed_memory() -> None:
    blocks = make_blocks(cache_bytes=2_000_000)
    rows = [blocks.admit() for _ in range(4)]
    place = np.zeros(4, np.int64)
    random = np.random.default_rng(0)
    while place.min() < 350:
        counts = random.multinomial(STEP - 4, [0.25] * 4) + 1
        stop = np.minimum(place + counts, 400)
        step(blocks, [r for r in rows if r is not None], place.tolist(), stop.tolist())
        settle(blocks, [r for r in rows if r is not None], stop.tolist())
        place = stop


def test_what_never_fits_is_refused_with_the_numbers() -> None:
    blocks = make_blocks(cache_bytes=620_000)
    blocks.refuse_if_never(900)
    with pytest.raises(CapacityError, match=r"1999 tokens needs .* bytes .* cache_bytes"):
        blocks.refuse_if_never(1999)
    make_blocks().refuse_if_never(1999)
    with pytest.raises(CapacityError, match="a KV cache of 100,000 bytes is too small: the windows of"):
        make_blocks(cache_bytes=100_000)


def test_memory_that_the_device_does_not_have_is_refused_at_the_start() -> None:
    with pytest.raises(CapacityError, match="a KV cache of 100,000,000,000,000,000 bytes is more than cpu gives"):
        make_blocks(cache_bytes=10**17, max_length=10**14, fill=None)


def test_no_more_sequences_are_admitted_than_there_are_table_rows() -> None:
    blocks = make_blocks()
    assert [blocks.admit() for _ in range(5)].count(None) == 1
