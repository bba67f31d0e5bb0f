"""Rows of pictures by content: found under the whole key only, bounded in bytes, least recently used first to go."""

from __future__ import annotations

import torch

from spyglass.engine.cache.images import ImageCache


def rows(value: float, count: int = 4) -> torch.Tensor:
    return torch.full((count, 8), float(value))  # 32 bytes a row


def test_rows_are_found_under_picture_and_adapter_only() -> None:
    cache = ImageCache(10_000)
    cache.put((b"a", b""), rows(1))
    cache.put((b"a", b"x"), rows(2))
    assert [cache.get(key) is not None for key in ((b"a", b""), (b"a", b"x"), (b"a", b"y"), (b"b", b""))] == [
        True,
        True,
        False,
        False,
    ]
    found = cache.get((b"a", b"x"))
    assert found is not None and torch.equal(found, rows(2))
    assert (cache.counts.queries, cache.counts.hits, cache.counts.bytes_held) == (5, 3, 256)


def test_the_least_recently_used_goes_first_and_the_bytes_stay_below_the_limit() -> None:
    cache = ImageCache(300)
    for name in (b"a", b"b"):
        cache.put((name, b""), rows(0))
    assert cache.get((b"a", b"")) is not None
    cache.put((b"c", b""), rows(0, count=5))
    assert cache.get((b"b", b"")) is None
    assert cache.get((b"a", b"")) is not None
    assert cache.counts.bytes_held == 128 + 160
    cache.put((b"d", b""), rows(0, count=9))
    assert (cache.counts.bytes_held, len(cache), cache.counts.evictions) == (288, 1, 3)
    cache.clear()
    assert (cache.counts.bytes_held, len(cache)) == (0, 0)


def test_what_exceeds_the_whole_cache_leaves_the_others_in_it() -> None:
    cache = ImageCache(300)
    cache.put((b"a", b""), rows(0))
    cache.put((b"b", b""), rows(0, count=10))
    assert (cache.get((b"a", b"")) is not None, cache.get((b"b", b""))) == (True, None)


def test_a_cache_of_nothing_keeps_nothing() -> None:
    cache = ImageCache(0)
    cache.put((b"a", b""), rows(0))
    assert len(cache) == 0


def test_a_part_of_a_larger_tensor_is_copied_so_that_the_rest_can_go() -> None:
    cache = ImageCache(10_000)
    whole = torch.zeros(1000, 8)
    cache.put((b"a", b""), whole[3:7])
    found = cache.get((b"a", b""))
    assert found is not None and found.untyped_storage().nbytes() == 128
