"""Memory for rows: which pages of which group each running sequence holds. Knows groups, not models.

A group is a set of row tensors with one page table. Groups that keep everything (pools) give a sequence one page after
the other; groups with a retention (window, state) use a ring of table columns, and pages behind the retention go back.
The memory of a group grows as needed, or has a fixed size when a byte limit is set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.config.cache import CachePlan
from spyglass.engine.cache.pages import Group, PageMemory, PagePool, groups_of
from spyglass.errors import CapacityError

Ints = NDArray[np.int64]

_ALL = 1 << 40  # tokens; the retention of what keeps everything


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Memory of the first `tokens` tokens of some sequence, enough to go on behind them.

    `pages` of the pools by group, held; copies of what rings keep (CachePlan) lie under `number` in the memory and take
    `row_bytes`.
    """

    tokens: int
    pages: Mapping[str, NDArray[np.int32]]
    number: int
    row_bytes: int


class CacheAllocator:
    """Page pools of all groups and the page tables of the running sequences.

    `max_sequences` sequences hold a table row each; no step has more than `step_tokens` rows. With `cache_bytes` all
    memory is allocated at once: rings for every sequence, the rest for pools. `fill` poisons fresh and returned pages
    (tests). `memory` makes what rows lie in. `page_rows` (also an attribute, of all groups) is rows per page by group.

    Raises:
        CapacityError: `cache_bytes` does not hold the rings and one full step, or the device does not hold it.
    """

    def __init__(
        self,
        plans: Sequence[CachePlan],
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_sequences: int,
        step_tokens: int,
        max_length: int,
        cache_bytes: int | None = None,
        page_rows: Mapping[str, int] | None = None,
        fill: float | None = None,
        memory: Callable[..., PageMemory] = PageMemory,
    ) -> None:
        self.groups = groups_of(plans, dtype, page_rows)
        self.memory, self.step_tokens = memory(self.groups, dtype, device, fill), step_tokens
        self._next_snapshot = 0
        limits = _limits(self.groups, max_sequences, step_tokens, max_length, cache_bytes)
        try:
            self.pools = {
                g.name: PagePool(g, self.memory, limits[g.name], clears=fill is not None) for g in self.groups
            }
        except RuntimeError as error:  # what torch's allocators raise
            told = f"a KV cache of {cache_bytes:,} bytes is more than {device} gives; state a lower cache_bytes"
            raise CapacityError(told) from error
        self._tables: dict[str, NDArray[np.int32]] = {}
        for group in self.groups:
            width = 1 if group.retention is None else group.kept_pages + -(-step_tokens // group.page_rows)
            self._tables[group.name] = np.full((max_sequences, width), -1, np.int32)
        self._live_G2S = np.zeros((len(self.groups), 2, max_sequences), np.int64)  # logical pages: first, stop
        self.page_rows = {g.name: g.page_rows for g in self.groups}
        self._stable_until_S = np.zeros(max_sequences, np.int64)  # fewer tokens than these need no other pages
        self._live = {g.name: live for g, live in zip(self.groups, self._live_G2S, strict=True)}
        columns = [(g.tokens_per_row, g.page_rows, _ALL if g.retention is None else g.retention) for g in self.groups]
        self._row_tokens_G1, self._page_rows_G1, self._retention_G1 = np.array(columns, np.int64).T[:, :, None]
        self._page_tokens_G1 = self._row_tokens_G1 * self._page_rows_G1
        self._keeps_all_G1 = (self._retention_G1 == _ALL).astype(np.int64)
        self._carries_G1 = np.array([[g.carries] for g in self.groups])
        self._free_rows = list(range(max_sequences - 1, -1, -1))

    @property
    def pages(self) -> dict[tuple[str, int], torch.Tensor]:
        """Row tensors by (kind, layer), as CacheView wants them."""
        return self.memory.pages

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all row tensors."""
        return sum(pool.capacity * pool.group.page_bytes for pool in self.pools.values())

    @property
    def max_tokens_alone(self) -> int | None:
        """Tokens of the longest sequence that fits alone; None where memory grows."""
        kept = [(g, self.pools[g.name].limit) for g in self.groups if g.retention is None]
        each = [(limit * g.page_rows + 1) * g.tokens_per_row - 1 for g, limit in kept if limit is not None]
        return min(each, default=None)

    def share_used(self, spare: Mapping[str, int]) -> float:
        """Pages held of the fullest pool, as a share of what it may have (or, where memory grows, of what it has).

        `spare` pages by group are held, but could be had.
        """
        pools = [(self.pools[g.name], spare[g.name]) for g in self.groups if g.retention is None]
        return max(((pool.num_used - n) / pool.capacity for pool, n in pools if pool.capacity), default=0.0)

    def refuse_if_never(self, tokens: int) -> None:
        """Raises CapacityError when a sequence of `tokens` tokens would not fit even alone."""
        for group in self.groups:
            limit = self.pools[group.name].limit
            if group.retention is None and limit is not None and group.pages_for(tokens) > limit:
                need, have = group.pages_for(tokens) * group.page_bytes, limit * group.page_bytes
                raise CapacityError(
                    f"a request of {tokens} tokens needs {need:,} bytes of {group.name} rows, the engine has {have:,}, "
                    f"enough for {self.max_tokens_alone} tokens; raise cache_bytes, shorten the prompt or lower "
                    "max_tokens"
                )

    def has_room(self, tokens: Sequence[int]) -> bool:
        """Whether sequences of so many tokens each fit together into the pools."""
        pools = [(g, self.pools[g.name].limit) for g in self.groups if g.retention is None]
        return all(limit is None or sum(group.pages_for(count) for count in tokens) <= limit for group, limit in pools)

    @property
    def num_free_rows(self) -> int:
        """Table rows that `admit` can give."""
        return len(self._free_rows)

    def admit(self) -> int | None:
        """A table row for one more sequence; None = all are taken."""
        return self._free_rows.pop() if self._free_rows else None

    def reserve(self, rows: Ints, tokens: Ints) -> bool:
        """Give table rows `rows` the pool pages of so many first tokens each.

        False, and nothing taken, if there are too few pages for all of them.
        """
        due = self._outgrown(rows, tokens)
        if not len(due):
            return True
        rows, tokens = rows[due], tokens[due]
        stop_GS = tokens * self._keeps_all_G1
        missing_GS = np.maximum(self._pages(stop_GS) - self._live_G2S[:, 1, rows], 0)
        if not missing_GS.any():
            return True
        for group, missing in zip(self.groups, missing_GS.sum(axis=1), strict=True):
            pool = self.pools[group.name]
            if pool.limit is not None and missing > pool.num_free:
                return False
        none_GS = np.zeros_like(stop_GS)
        self._set_live(rows, none_GS, none_GS, stop_GS)
        return True

    def allocate(self, rows: Ints, start: Ints, stop: Ints, resumable: Sequence[tuple[int, int]] = ()) -> None:
        """Give table rows `rows` the pages that a step over tokens [start, stop) reads and writes.

        A fixed memory has pages of rings for every step; those of pools must have been reserved. `resumable` (table
        row, position in (start, stop]): a snapshot is to be taken there after the step.
        """
        due = self._outgrown(rows, stop)
        if len(due):
            rows, start, stop = rows[due], start[due], stop[due]
            first_GS = np.maximum(start - self._retention_G1, 0)
            write_GS = np.where(self._carries_G1, np.maximum(start, stop - self._retention_G1), start)
            self._set_live(rows, first_GS, write_GS, stop)
        for group in self.groups:
            if group.carries:
                for row, position in resumable:
                    self._fill_in(group, row, position)

    def release_expired(self, rows: Ints, stop: Ints) -> None:
        """Take back the pages behind the retention of sequences that now have `stop` tokens."""
        due = self._outgrown(rows, stop)
        if not len(due):
            return
        rows, stop = rows[due], stop[due]
        first_GS = np.maximum(stop - self._retention_G1, 0)
        self._set_live(rows, first_GS, first_GS + _ALL, stop)

    def table_rows(self, rows: Ints) -> dict[str, NDArray[np.int32]]:
        """Page tables of table rows `rows` as they are now, [S, P] by group (logical page modulo width)."""
        return {name: table.take(rows, axis=0) for name, table in self._tables.items()}

    def snapshot(self, row: int, tokens: int) -> Snapshot:
        """What is needed to go on after the first `tokens` tokens of a sequence, until `forget`.

        They end this step or are a resumable position of it, and `release_expired` has not been called since.
        """
        pages, row_bytes, number = {}, 0, self._next_snapshot
        self._next_snapshot += 1
        for group in self.groups:
            if group.retention is None:
                pages[group.name] = self._tables[group.name][row, : group.pages_for(tokens)].copy()
                self.pools[group.name].share(pages[group.name])
            else:
                place_W = self._kept_rows(group, row, tokens)
                self.memory.keep(number, group.name, place_W)
                row_bytes += len(place_W) * group.page_bytes // group.page_rows
        return Snapshot(tokens=tokens, pages=pages, number=number, row_bytes=row_bytes)

    def has_page_for(self, snapshot: Snapshot) -> bool:
        """Whether the pages that `restore` copies fit into the memory now."""
        growing = [
            self.pools[g.name]
            for g in self.groups
            if g.retention is None and snapshot.tokens // g.tokens_per_row % g.page_rows
        ]
        return all(pool.limit is None or pool.num_free for pool in growing)

    def restore(self, row: int, snapshot: Snapshot) -> None:
        """Let a table row go on from a snapshot instead of what it has.

        Full pages are shared, one that will be written is copied: `has_page_for` must have been asked.
        """
        self._clear(row)
        for group in self.groups:
            pool, live = self.pools[group.name], self._live[group.name]
            if group.retention is None:
                whole, rest = divmod(snapshot.tokens // group.tokens_per_row, group.page_rows)
                shared = snapshot.pages[group.name][:whole]
                pool.share(shared)
                self._widened(group, whole)[row, :whole] = shared
                live[:, row] = 0, whole
                if rest:
                    self._add(group, row, whole, whole + 1)
                    live[1, row] += 1
                    page, copy = snapshot.pages[group.name][whole], self._tables[group.name][row, whole]
                    self.memory.copy(group.name, int(page), int(copy), rest)
            else:
                first = max(0, snapshot.tokens - group.retention) // group.page_rows
                live[:, row] = first, -(-snapshot.tokens // group.page_rows)
                self._fill_in(group, row, snapshot.tokens)
                place_W = self._kept_rows(group, row, snapshot.tokens)
                self.memory.restore(snapshot.number, group.name, place_W)

    def forget(self, snapshot: Snapshot) -> None:
        """Take back the pages that a snapshot holds."""
        for name, pages in snapshot.pages.items():
            self.pools[name].give_back(pages)
        self.memory.forget(snapshot.number)

    def truncate(self, row: int, tokens: int) -> bool:
        """Keep the first `tokens` tokens of a sequence, at most the lookahead of the plans less than it has.

        A page that others share and that will be written again is copied. False, and nothing changed: there is none.
        """
        shared: list[tuple[Group, int, int]] = []
        for group in self.groups:
            if group.retention is None:
                whole, rest = divmod(tokens // group.tokens_per_row, group.page_rows)
                page = int(self._tables[group.name][row, whole]) if rest else -1
                if page >= 0 and self.pools[group.name].is_shared(page):
                    shared.append((group, whole, rest))
        pools = [self.pools[group.name] for group, _, _ in shared]
        if any(pool.limit is not None and not pool.num_free for pool in pools):
            return False
        for group in self.groups:
            first, stop = self._live[group.name][:, row].tolist()
            kept = max(first, group.pages_for(tokens))
            self._drop(group, row, kept, stop)
            self._live[group.name][1, row] = min(kept, stop)
        for (group, whole, rest), pool in zip(shared, pools, strict=True):
            table = self._tables[group.name]
            page = int(table[row, whole])
            table[row, whole] = pool.take(1)[0]
            self.memory.copy(group.name, page, int(table[row, whole]), rest)
            pool.give_back(np.array([page]))
        self._stable_until_S[row] = 0
        return True

    def release(self, row: int) -> None:
        """Take back all pages and the table row."""
        self._clear(row)
        self._free_rows.append(row)

    def _clear(self, row: int) -> None:
        for group in self.groups:
            first, stop = self._live[group.name][:, row].tolist()
            self._drop(group, row, first, stop)
            self._live[group.name][:, row] = 0
        self._stable_until_S[row] = 0

    def _outgrown(self, rows: Ints, stop: Ints) -> Ints:
        """Which of some table rows may need other pages than they have, for steps that end at `stop` tokens."""
        due: Ints = (stop >= self._stable_until_S[rows]).nonzero()[0]
        return due

    def _set_live(self, rows: Ints, first_GS: Ints, write_GS: Ints, stop_GS: Ints) -> None:
        """Hold the pages of tokens from `first` on that are there, and of [write, stop); tokens, by group and row."""
        live_first_GS, live_stop_GS = self._live_G2S[:, 0, rows], self._live_G2S[:, 1, rows]
        first_GS = first_GS // self._page_tokens_G1
        stop_GS = self._pages(stop_GS)
        changes_GS = (first_GS > live_first_GS) | (stop_GS > live_stop_GS)
        for g, i in zip(*(axis.tolist() for axis in changes_GS.nonzero()), strict=True):
            group, row = self.groups[g], int(rows[i])
            first, stop, live_first, live_stop = (
                int(pages[g, i]) for pages in (first_GS, stop_GS, live_first_GS, live_stop_GS)
            )
            self._drop(group, row, live_first, min(first, live_stop))
            written = int(write_GS[g, i]) // (group.tokens_per_row * group.page_rows)
            self._add(group, row, max(live_stop, written), stop)
            self._live_G2S[g, :, row] = first, max(stop, live_stop)
        live_first_GS, live_stop_GS = self._live_G2S[:, 0, rows], self._live_G2S[:, 1, rows]
        grows_GS = (live_stop_GS * self._page_rows_G1 + 1) * self._row_tokens_G1
        expires_GS = (live_first_GS + 1) * self._page_tokens_G1 + self._retention_G1
        self._stable_until_S[rows] = np.minimum(grows_GS, expires_GS).min(axis=0)

    def _pages(self, tokens_GS: Ints) -> Ints:
        """`Group.pages_for` of many, by group and row."""
        return -(-(tokens_GS // self._row_tokens_G1) // self._page_rows_G1)

    def _add(self, group: Group, row: int, first: int, stop: int) -> None:
        if first < stop:
            table = self._widened(group, stop)
            table[row, np.arange(first, stop) % table.shape[1]] = self.pools[group.name].take(stop - first)

    def _fill_in(self, group: Group, row: int, tokens: int) -> None:
        """Pages, where there are none, for the rows that are kept behind position `tokens` of a ring."""
        assert group.retention is not None
        table = self._tables[group.name]
        pages = np.arange(max(0, tokens - group.retention) // group.page_rows, -(-tokens // group.page_rows))
        columns = pages % table.shape[1]
        columns = columns[table[row, columns] < 0]
        if len(columns):
            table[row, columns] = self.pools[group.name].take(len(columns))

    def _kept_rows(self, group: Group, row: int, tokens: int) -> Ints:
        """Flat rows of the tokens that are kept behind position `tokens` of a ring, int64 [W]."""
        assert group.retention is not None
        token_W = np.arange(max(0, tokens - group.retention), tokens)
        table = self._tables[group.name]
        page_W = table[row, token_W // group.page_rows % table.shape[1]].astype(np.int64)
        assert (page_W >= 0).all(), f"rows of group {group.name} before token {tokens} have been taken back"
        return page_W * group.page_rows + token_W % group.page_rows

    def _drop(self, group: Group, row: int, first: int, stop: int) -> None:
        if first < stop:
            table = self._tables[group.name]
            columns = np.arange(first, stop) % table.shape[1]
            pages = table[row, columns]
            self.pools[group.name].give_back(pages[pages >= 0])
            table[row, columns] = -1

    def _widened(self, group: Group, pages: int) -> NDArray[np.int32]:
        """The group's table, wider if a pool outgrows it. Rings never do: their width covers a whole step."""
        table = self._tables[group.name]
        if group.retention is None and pages > table.shape[1]:
            grown = np.full((len(table), max(pages, 2 * table.shape[1])), -1, np.int32)
            grown[:, : table.shape[1]] = table
            self._tables[group.name] = table = grown
        return table


def _limits(
    groups: Sequence[Group], max_sequences: int, step_tokens: int, max_length: int, cache_bytes: int | None
) -> dict[str, int | None]:
    """Most pages per group; None = grows. Rings get what one step can touch at most, pools share what is left."""
    if cache_bytes is None:
        return {group.name: None for group in groups}
    limits: dict[str, int | None] = {}
    pools = [g for g in groups if g.retention is None]
    left = cache_bytes
    for group in groups:
        if group.retention is not None:
            pages = max_sequences * (group.kept_pages + 1) + -(-step_tokens // group.page_rows)
            limits[group.name] = pages
            left -= pages * group.page_bytes
    token_bytes = sum(g.page_bytes / (g.page_rows * g.tokens_per_row) for g in pools)
    tokens = int(left / token_bytes) if pools else 0
    if left < 0 or (pools and tokens < step_tokens):
        raise CapacityError(
            f"a KV cache of {cache_bytes:,} bytes is too small: the windows of {max_sequences} sequences take "
            f"{cache_bytes - left:,} and one full step another {int(token_bytes * step_tokens):,}; lower "
            "max_sequences, or state a higher cache_bytes if there is memory"
        )
    for group in pools:
        affordable = tokens // (group.tokens_per_row * group.page_rows)
        limits[group.name] = min(max_sequences * group.pages_for(max_length), max(1, affordable))
    return limits
