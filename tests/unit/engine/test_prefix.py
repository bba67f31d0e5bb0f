"""Names of prefixes: equal for equal beginnings, different for whatever the rows depend on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spyglass.engine.cache.prefix import PrefixCache, PrefixHashes
from spyglass.engine.request import SamplingParams
from spyglass.engine.sequence import Answer, Request, TokenSequence
from spyglass.lora.use import NO_ADAPTER, AdapterHandle
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.tokens import Patches, Prompt
from tests.engine_parts import engine_config, patches
from tests.unit.engine.test_allocator import make_blocks, used

CONFIG = engine_config()
B = 8
SECRET = b"k" * 32


def names_of(prompt: Prompt, adapter: AdapterHandle = NO_ADAPTER, answer: tuple[int, ...] = ()) -> PrefixHashes:
    return PrefixHashes(make_sequence(prompt, adapter, answer), SECRET, B)


def make_sequence(prompt: Prompt, adapter: AdapterHandle = NO_ADAPTER, answer: tuple[int, ...] = ()) -> TokenSequence:
    request = Request(prompt=prompt, params=SamplingParams())
    sequence = TokenSequence(0, request, Answer(request, limit=50), adapter=adapter)
    for token in answer:
        sequence.expect()
        sequence.resolve(token)
    return sequence


def prompt_of(*parts: Any) -> Prompt:
    return prompt_from_parts(list(parts), CONFIG)


def shared(a: PrefixHashes, b: PrefixHashes, most: int) -> int:
    """Tokens of the longest beginning with one name; every shorter one must have one name too, no longer one."""
    same = [a.prefix(tokens) == b.prefix(tokens) for tokens in range(1, most + 1)]
    assert same == sorted(same, reverse=True)
    return sum(same)


IDS = st.lists(st.integers(2, 4), min_size=1, max_size=40)


@given(a=IDS, b=IDS, common=IDS)
def test_two_texts_share_the_names_of_exactly_what_they_have_in_common(
    a: list[int], b: list[int], common: list[int]
) -> None:
    a, b = common + a, common + b
    most = min(len(a), len(b))
    expected = next((t for t in range(most) if a[t] != b[t]), most)
    assert shared(names_of(prompt_of(a)), names_of(prompt_of(b)), most) == expected


def test_an_answer_that_becomes_part_of_a_prompt_keeps_its_name() -> None:
    asked, answered = (
        names_of(prompt_of([2, 3, 4] * 5), answer=(5, 6, 7)),
        names_of(prompt_of([2, 3, 4] * 5 + [5, 6, 7])),
    )
    assert shared(asked, answered, 18) == 18


def test_another_picture_or_plan_parts_the_names_where_its_block_begins() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 3, 4, 4), dtype=np.uint8)
    other = pixels.copy()
    other[-1, -1, -1, -1] ^= 1
    for before in range(1, 20):
        a, b = (prompt_of([5] * before, Patches(each, (4, 4)), [6] * 9) for each in (pixels, other))
        assert (a.ids_T == b.ids_T).all()
        assert shared(names_of(a), names_of(b), len(a)) == before
        planned = dataclasses.replace(a, digests=(b"the same pixels, another plan",))
        assert shared(names_of(a), names_of(planned), len(a)) == before


def test_a_picture_counts_where_it_stands() -> None:
    """One picture, then another, against the other way round: kinds and ids agree, the order does not."""
    one, two = patches(2, 2, seed=1), patches(2, 2, seed=2)
    a, b = prompt_of([5], one, [6], two, [7] * 9), prompt_of([5], two, [6], one, [7] * 9)
    assert len(a) == len(b)
    assert shared(names_of(a), names_of(b), len(a)) == 1


def test_kinds_count_beside_ids() -> None:
    a = prompt_of([5], patches(4, 4, seed=1), [6] * 9)
    kinds = a.kinds_T.copy()
    place = int(np.flatnonzero(kinds == 3)[0])
    kinds[place] = 1
    assert shared(names_of(a), names_of(dataclasses.replace(a, kinds_T=kinds)), len(a)) == place


def test_a_text_adapter_parts_all_names_and_a_picture_adapter_those_from_the_first_picture_on() -> None:
    prompt = prompt_of([5] * 11, patches(4, 4, seed=1), [6] * 9)
    plain = names_of(prompt)
    assert shared(plain, names_of(prompt, AdapterHandle(adapter_id=1, text_digest=b"a")), len(prompt)) == 0
    assert shared(plain, names_of(prompt, AdapterHandle(adapter_id=1, vision_digest=b"a")), len(prompt)) == 11
    assert shared(plain, names_of(prompt, AdapterHandle(adapter_id=3)), len(prompt)) == len(prompt)


def test_names_depend_on_a_secret() -> None:
    sequence = make_sequence(prompt_of([5] * 9))
    assert PrefixHashes(sequence, b"x" * 32, B).prefix(9) != PrefixHashes(sequence, SECRET, B).prefix(9)


@given(seed=st.integers(0, 10_000), limit=st.sampled_from([1, 30_000, 60_000, 1 << 30]))
def test_bytes_and_pages_are_counted_whatever_comes_and_goes(seed: int, limit: int) -> None:
    random = np.random.default_rng(seed)
    blocks = make_blocks()
    cache = PrefixCache(blocks, limit, B)
    for _ in range(6):
        sequence = make_sequence(prompt_of(random.integers(2, 4, random.integers(2, 50)).tolist()))
        sequence.row = row = blocks.admit()
        assert row is not None
        cache.resume(sequence)
        stop = sequence.length
        assert sequence.computed < stop
        places = cache.snapshot_positions(sequence, sequence.computed, stop)
        blocks.allocate(np.array([row]), np.array([sequence.computed]), np.array([stop]), [(row, p) for p in places])
        for place in places:
            cache.store(sequence, place)
        blocks.release(row)
        assert cache.counts.bytes_held <= limit
        held = used(blocks)
        entries = [entry.snapshot for entry in cache.entries.values()]
        pages = {name: {int(p) for e in entries for p in e.pages.get(name, ())} for name in held}
        assert held == {name: len(each) for name, each in pages.items()}
        page_bytes = sum(len(pages[g.name]) * g.page_bytes for g in blocks.groups)
        assert cache.counts.bytes_held == page_bytes + sum(entry.row_bytes for entry in entries)
    cache.clear()
    assert (cache.counts.bytes_held, len(cache)) == (0, 0)
    assert set(used(blocks).values()) == {0}


def test_the_least_recently_used_snapshot_goes_first() -> None:
    blocks = make_blocks()
    cache = PrefixCache(blocks, 1 << 30, B)
    for first in (2, 3, 4):
        sequence = make_sequence(prompt_of([first] * 6))
        sequence.row = blocks.admit()
        blocks.allocate(np.array([sequence.row]), np.array([0]), np.array([5]))
        cache.store(sequence, 5)
        assert first > 2 or not cache.evict_one(), "forgetting it would free nothing"
        blocks.release(sequence.row)
    found = {}
    for first in (2, None, 4, 3, 2):
        if first is None:
            assert cache.evict_one()
            continue
        sequence = make_sequence(prompt_of([first] * 6))
        sequence.row = blocks.admit()
        cache.resume(sequence)
        found[first] = sequence.computed
        blocks.release(sequence.row)
    assert found == {2: 5, 4: 5, 3: 0}


def test_a_request_goes_on_from_the_longest_of_the_prefixes_known_of_it_and_never_from_its_whole_length() -> None:
    blocks = make_blocks()
    cache = PrefixCache(blocks, 1 << 30, B)
    places = [2, 5, B, B + 3, B + 6, 2 * B + 1]
    sequence = make_sequence(prompt_of([2] * 20))
    sequence.row = row = blocks.admit()
    assert row is not None
    blocks.allocate(np.array([row]), np.array([0]), np.array([20]), [(row, place) for place in places])
    for place in places:
        cache.store(sequence, place)
    for length in range(3, 20):
        again = make_sequence(prompt_of([2] * length))
        again.row = blocks.admit()
        cache.resume(again)
        assert again.computed == max(place for place in places if place < length)
        blocks.release(again.row)


def test_pages_are_freed_from_the_end_of_a_prefix_and_its_beginning_stays() -> None:
    """Of one sequence the longest snapshot goes first, although it is the youngest."""
    blocks = make_blocks()
    cache = PrefixCache(blocks, 1 << 30, B)
    sequence = make_sequence(prompt_of([2] * 60))
    sequence.row = row = blocks.admit()
    assert row is not None
    places = [20, 21, 40, 60]
    blocks.allocate(np.array([row]), np.array([0]), np.array([60]), [(row, place) for place in places])
    for place in places:
        cache.store(sequence, place)
    assert not cache.evict_one(), "the sequence holds all pages itself"
    blocks.release(row)
    left, free = [], []
    while cache.evict_one():
        left.append(sorted(entry.snapshot.tokens for entry in cache.entries.values()))
        free.append(blocks.pools["pool4"].num_free)
    assert left == [[20, 21, 40], [20, 21], [21], []]
    assert free == sorted(free) and free[1] > free[0] and used(blocks)["pool4"] == 0
