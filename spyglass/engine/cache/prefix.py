"""Prefixes that have been computed before: what they are called, and the snapshots from which a request may go on.

A prefix is named by a chain of keyed hashes over blocks of B tokens:

  name_0 = H(text adapter)      name_k+1 = H(name_k, ids, kinds, images that begin in the block)

where an image counts by its position, the digest of its pixels and plan, and the image adapter; a prefix that ends
inside a block ends with a shorter one. Only snapshots can be gone on from, so a hit is exact: nothing is approximated.
They are left at multiples of B, behind every image, before the last token of every prompt (which is always run
again) and where an answer ends. Least recently used ones go first.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spyglass.engine.cache.allocator import CacheAllocator, Snapshot
from spyglass.engine.sequence import TokenSequence

BLOCK_TOKENS = 256
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCounts:
    """Since the start, in tokens: known ones of requests that were looked up, and those that were found.

    `evictions` counts snapshots that had to make room, `bytes_held` what those that are there take.
    """

    queried_tokens: int = 0
    found_tokens: int = 0
    evictions: int = 0
    bytes_held: int = 0


class PrefixHashes:
    """Hashes of the prefixes of one sequence, computed when asked for; `positions` rising, worth a snapshot."""

    __slots__ = ("_block", "_names", "_secret", "_sequence", "_starts", "positions")

    def __init__(self, sequence: TokenSequence, secret: bytes, block: int) -> None:
        self._sequence, self._secret, self._block = sequence, secret, block
        self._names = [self._hash(b"", sequence.adapter.text_digest)]
        spans, length = sequence.prompt.spans, len(sequence.prompt)
        self._starts = np.array([span.start for span in spans], np.int64)
        ends = {span.start + span.length for span in spans} | {sequence.last_cut(length - 1)}
        self.positions = np.array(sorted(ends - {0}), np.int64)

    def block(self, number: int) -> bytes:
        """Name of the first `number` blocks."""
        while len(self._names) <= number:
            first = (len(self._names) - 1) * self._block
            self._names.append(self._tail(self._names[-1], first, first + self._block))
        return self._names[number]

    def truncate(self, tokens: int) -> None:
        """Forget hashes of blocks that reach beyond the first `tokens` tokens."""
        del self._names[tokens // self._block + 1 :]

    def prefix(self, tokens: int) -> bytes:
        """Name of the first `tokens` tokens, at least one."""
        number = (tokens - 1) // self._block
        return self._tail(self.block(number), number * self._block, tokens)

    def _tail(self, before: bytes, start: int, stop: int) -> bytes:
        sequence = self._sequence
        facts = [sequence.ids(start, stop).tobytes(), sequence.kinds(start, stop).tobytes()]
        first, last = np.searchsorted(self._starts, [start, stop])
        for span in sequence.prompt.spans[first:last]:
            position = (span.start - start).to_bytes(8, "little")
            facts += [position, sequence.prompt.digests[span.image], sequence.adapter.vision_digest]
        return self._hash(before, *facts)

    def _hash(self, *facts: bytes) -> bytes:
        digest = hashlib.blake2b(key=self._secret, digest_size=_DIGEST_BYTES)
        for fact in facts:
            digest.update(len(fact).to_bytes(8, "little"))
            digest.update(fact)
        return digest.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    snapshot: Snapshot
    parent: bytes  # name of the whole blocks before the last token
    tail: int  # tokens behind them


class PrefixCache:
    """Snapshots by name, at most `limit_bytes` of copies and pages; 0 keeps none. Pages shared by several count once.

    `block_tokens`: B.
    """

    def __init__(self, allocator: CacheAllocator, limit_bytes: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self._allocator, self._limit, self._block = allocator, limit_bytes, block_tokens
        self._secret = secrets.token_bytes(_DIGEST_BYTES)
        self.entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._tails: dict[bytes, dict[int, int]] = {}  # parent -> length of a tail -> entries
        self._held = {name: np.zeros(0, np.int32) for name in allocator.pools}  # entries per page
        self._bytes = 0
        self._queried = self._found = self._evictions = 0

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def counts(self) -> PrefixCounts:
        """Counters and what is held now."""
        return PrefixCounts(
            queried_tokens=self._queried,
            found_tokens=self._found,
            evictions=self._evictions,
            bytes_held=self._bytes,
        )

    def spare_pages(self) -> dict[str, int]:
        """Pages by group that only snapshots hold."""
        return {name: pool.count_only_in(self._held[name]) for name, pool in self._allocator.pools.items()}

    def resume(self, sequence: TokenSequence) -> None:
        """Let a sequence that has a table row go on from the longest known prefix, if that is more than it has.

        At least its last token is left to run, and everything where logits of the prompt are wanted.
        """
        if not self._limit or sequence.wants_prompt_rows:
            return
        assert sequence.row is not None
        if sequence.prefix_hashes is None:
            self._queried += sequence.length
        known = sequence.cached
        for name in self._matches(sequence):
            entry = self.entries[name]
            self.entries.move_to_end(name)
            while not self._allocator.has_page_for(entry.snapshot) and self.evict_one():
                pass
            if name in self.entries and self._allocator.has_page_for(entry.snapshot):
                self._allocator.restore(sequence.row, entry.snapshot)
                sequence.resume_from(entry.snapshot.tokens)
                self._found += sequence.cached - known
                return

    def snapshot_positions(self, sequence: TokenSequence, start: int, stop: int) -> list[int]:
        """Where in (start, stop] a step over these tokens should leave snapshots that are not there yet."""
        if not self._limit:
            return []
        blocks = range(start - start % self._block + self._block, stop + 1, self._block)
        if start >= len(sequence.prompt) and not blocks:
            return []
        special = self._names(sequence).positions
        first, last = np.searchsorted(special, [start, stop], side="right")
        positions = {p for p in blocks if sequence.last_cut(p) == p} | set(special[first:last].tolist())
        # what a token under way will make is not known yet
        return [p for p in sorted(positions) if p > sequence.known or not self._touch(sequence, p)]

    def store(self, sequence: TokenSequence, tokens: int) -> None:
        """Keep a snapshot of the first `tokens` tokens of a running sequence (see `CacheAllocator.snapshot`)."""
        if not self._limit or not tokens or self._touch(sequence, tokens):
            return
        assert sequence.row is not None
        names, number = self._names(sequence), (tokens - 1) // self._block
        entry = _Entry(
            snapshot=self._allocator.snapshot(sequence.row, tokens),
            parent=names.block(number),
            tail=tokens - number * self._block,
        )
        self.entries[names.prefix(tokens)] = entry
        tails = self._tails.setdefault(entry.parent, {})
        tails[entry.tail] = tails.get(entry.tail, 0) + 1
        self._count(entry.snapshot, 1)
        while self._bytes > self._limit:
            self._evict(next(iter(self.entries)))

    def truncate(self, row: int, tokens: int) -> bool:
        """`CacheAllocator.truncate`, for which snapshots make room."""
        while not self._allocator.truncate(row, tokens):
            if not self.evict_one():
                return False
        return True

    def evict_one(self) -> bool:
        """Forget one snapshot so that pages become free, now or when more go; False when all are in use by sequences.

        Of those whose end alone can go, the least recently used: what it shares with shorter ones stays.
        """
        name = next((name for name, entry in self.entries.items() if self._frees_pages(entry.snapshot)), None)
        if name is None:
            name = next((name for name, entry in self.entries.items() if self._has_spare(entry.snapshot)), None)
        if name is not None:
            self._evict(name)
        return name is not None

    def _frees_pages(self, snapshot: Snapshot) -> bool:
        return any(self._allocator.pools[group].held_once(pages) for group, pages in snapshot.pages.items())

    def _has_spare(self, snapshot: Snapshot) -> bool:
        pools, held = self._allocator.pools, self._held
        return any(pools[group].only_in(held[group], pages) for group, pages in snapshot.pages.items())

    def _evict(self, name: bytes) -> None:
        """Forget one snapshot for want of room."""
        self._evictions += 1
        self._forget(name)

    def _forget(self, name: bytes) -> None:
        entry = self.entries.pop(name)
        tails = self._tails[entry.parent]
        tails[entry.tail] -= 1
        if not tails[entry.tail]:
            del tails[entry.tail]
        if not tails:
            del self._tails[entry.parent]
        self._count(entry.snapshot, -1)
        self._allocator.forget(entry.snapshot)

    def clear(self) -> None:
        """Forget everything; that is no eviction, since room was not what was wanted."""
        for name in list(self.entries):
            self._forget(name)

    def _matches(self, sequence: TokenSequence) -> Iterator[bytes]:
        """Names of the known prefixes longer than what is computed and shorter than the sequence, longest first."""
        names, most = self._names(sequence), min(sequence.length - 1, sequence.known)
        for number in range((most - 1) // self._block, sequence.computed // self._block - 1, -1):
            for tail in sorted(self._tails.get(names.block(number), ()), reverse=True):
                tokens = number * self._block + tail
                name = names.prefix(tokens) if sequence.computed < tokens <= most else b""
                if name in self.entries:
                    yield name

    def _touch(self, sequence: TokenSequence, tokens: int) -> bool:
        """Whether a prefix is known; if so it counts as used now."""
        name = self._names(sequence).prefix(tokens)
        if name not in self.entries:
            return False
        self.entries.move_to_end(name)
        return True

    def _names(self, sequence: TokenSequence) -> PrefixHashes:
        if sequence.prefix_hashes is None:
            sequence.prefix_hashes = PrefixHashes(sequence, self._secret, self._block)
        return sequence.prefix_hashes

    def _count(self, snapshot: Snapshot, by: int) -> None:
        """Add a snapshot to the bytes held, or take it away."""
        self._bytes += by * snapshot.row_bytes
        for name, pages in snapshot.pages.items():
            pool = self._allocator.pools[name]
            held = self._held[name] = _widened(self._held[name], pool.capacity)
            before = int(np.count_nonzero(held[pages]))
            held[pages] += by
            self._bytes += (int(np.count_nonzero(held[pages])) - before) * pool.group.page_bytes


def _widened(counts: NDArray[np.int32], size: int) -> NDArray[np.int32]:
    return np.append(counts, np.zeros(size - len(counts), np.int32)) if len(counts) < size else counts
