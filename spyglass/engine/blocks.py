"""Memory for rows: page pools per group, and which pages each running sequence holds. Knows groups, not models.

A group is a set of row tensors with one page table. Groups that keep everything (pools) give a sequence one page after
the other; groups with a retention (window, state) use a ring of table columns, and pages behind the retention go back.
The memory of a group grows as needed, or has a fixed size when a byte limit is set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.config.cache import CachePlan
from spyglass.errors import CapacityError

Ints = NDArray[np.int64]

_PAGE_ROWS = 64
_POOL_PAGE_TOKENS = 2048  # a page of a strongly compressed pool is kept short: one page should not outlast a chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors that share a page table. `page_bytes` counts one page of all of them."""

    name: str
    plans: tuple[CachePlan, ...]
    page_rows: int
    tokens_per_row: int
    retention: int | None
    page_bytes: int
    carries: bool  # rows are written only if a later step reads them (state), not for the step itself (window)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold all complete rows of `tokens` tokens."""
        return -(-(tokens // self.tokens_per_row) // self.page_rows)

    @property
    def kept_pages(self) -> int:
        """Most pages that the rows kept between steps can touch."""
        assert self.retention is not None
        return -(-self.retention // self.page_rows) + 1


def groups_of(
    plans: Sequence[CachePlan], dtype: torch.dtype, page_rows: Mapping[str, int] | None = None
) -> tuple[Group, ...]:
    """The plans by group; `page_rows` overrides the rows per page by group name."""
    named: dict[str, list[CachePlan]] = {}
    for plan in plans:
        named.setdefault(plan.group, []).append(plan)
    return tuple(_group(name, tuple(members), dtype, page_rows or {}) for name, members in named.items())


def _group(name: str, plans: tuple[CachePlan, ...], dtype: torch.dtype, page_rows: Mapping[str, int]) -> Group:
    first = plans[0]
    assert {(p.tokens_per_row, p.retention) for p in plans} == {(first.tokens_per_row, first.retention)}, name
    if first.retention is not None:
        rows = min(_PAGE_ROWS, max(1, first.retention))
    else:
        rows = max(1, min(_PAGE_ROWS, _POOL_PAGE_TOKENS // first.tokens_per_row))
    rows = page_rows.get(name, rows)
    row_bytes = sum(p.row_dim * _row_dtype(p, dtype).itemsize for p in plans)
    return Group(
        name=name,
        plans=plans,
        page_rows=rows,
        tokens_per_row=first.tokens_per_row,
        retention=first.retention,
        page_bytes=rows * row_bytes,
        carries=first.kind in ("state", "index_state"),
    )


def _row_dtype(plan: CachePlan, dtype: torch.dtype) -> torch.dtype:
    return dtype if plan.dtype == "activation" else torch.float32


class PagePool:
    """All pages of one group: the tensors, and which pages are free. `limit` None = grows."""

    def __init__(
        self, group: Group, dtype: torch.dtype, device: torch.device, limit: int | None, fill: float | None
    ) -> None:
        self.group = group
        self.limit = limit
        self.capacity = 0
        self._dtype, self._device, self._fill = dtype, device, fill
        self._free: list[int] = []
        self.tensors: dict[tuple[str, int], torch.Tensor] = {}
        self._resize(0 if limit is None else limit)

    @property
    def num_free(self) -> int:
        """Pages that can be taken without growing."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that sequences hold."""
        return self.capacity - len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` page numbers. Never fails for a growing pool; a fixed one must have been asked first."""
        if count > len(self._free):
            assert self.limit is None, f"group {self.group.name} has no {count} free pages; the scheduler must not ask"
            self._resize(max(self.capacity + count - len(self._free), self.capacity * 3 // 2, 4))
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """Return pages; with a `fill` their content is overwritten, so that a stale read shows."""
        self._free.extend(pages)
        if self._fill is not None and pages:
            for tensor in self.tensors.values():
                tensor[torch.as_tensor(pages, device=self._device)] = self._fill

    @torch.inference_mode(False)  # pages outlive the step that makes them grow
    def _resize(self, capacity: int) -> None:
        for plan in self.group.plans:
            shape = (capacity, self.group.page_rows, plan.row_dim)
            grown = torch.empty(shape, dtype=_row_dtype(plan, self._dtype), device=self._device)
            if self._fill is not None:
                grown.fill_(self._fill)
            if self.capacity:
                grown[: self.capacity] = self.tensors[plan.kind, plan.layer]
            self.tensors[plan.kind, plan.layer] = grown
        self._free.extend(range(capacity - 1, self.capacity - 1, -1))
        self.capacity = capacity


class Blocks:
    """Page pools of all groups and the page tables of the running sequences.

    `max_sequences` sequences hold a table row each; no step has more than `step_tokens` rows. With `cache_bytes` all
    memory is allocated at once: rings for every sequence, the rest for pools. `fill` poisons fresh and returned pages
    (tests).

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
    ) -> None:
        self.groups = groups_of(plans, dtype, page_rows)
        limits = _limits(self.groups, max_sequences, step_tokens, max_length, cache_bytes)
        try:
            self.pools = {g.name: PagePool(g, dtype, device, limits[g.name], fill) for g in self.groups}
        except RuntimeError as error:  # what torch's allocators raise
            raise CapacityError(f"cache_bytes is {cache_bytes:,}, more than {device} has left; lower it") from error
        self._tables: dict[str, NDArray[np.int32]] = {}
        for group in self.groups:
            width = 1 if group.retention is None else group.kept_pages + -(-step_tokens // group.page_rows)
            self._tables[group.name] = np.full((max_sequences, width), -1, np.int32)
        self._live = {g.name: np.zeros((2, max_sequences), np.int64) for g in self.groups}  # logical pages first, stop
        self._promised = {g.name: np.zeros(max_sequences, np.int64) for g in self.groups}
        self._free_rows = list(range(max_sequences - 1, -1, -1))

    @property
    def page_rows(self) -> dict[str, int]:
        """Rows per page by group."""
        return {g.name: g.page_rows for g in self.groups}

    @property
    def pages(self) -> dict[tuple[str, int], torch.Tensor]:
        """Row tensors [num_pages, page_rows, row_dim] by (kind, layer), as CacheView wants them."""
        return {key: tensor for pool in self.pools.values() for key, tensor in pool.tensors.items()}

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all row tensors."""
        return sum(pool.capacity * pool.group.page_bytes for pool in self.pools.values())

    def refuse_if_never(self, tokens: int) -> None:
        """Raises CapacityError when a sequence of `tokens` tokens would not fit even alone."""
        for group in self.groups:
            limit = self.pools[group.name].limit
            if group.retention is None and limit is not None and group.pages_for(tokens) > limit:
                need, have = group.pages_for(tokens) * group.page_bytes, limit * group.page_bytes
                raise CapacityError(
                    f"a request of {tokens} tokens needs {need:,} bytes of {group.name} rows, the engine has {have:,}; "
                    f"raise cache_bytes, shorten the prompt or lower max_tokens"
                )

    def admit(self, tokens: int) -> int | None:
        """A table row for a sequence of at most `tokens` tokens, its pool pages promised to it; None = not now."""
        if not self._free_rows:
            return None
        need = {g.name: g.pages_for(tokens) for g in self.groups if g.retention is None}
        for name, pages in need.items():
            limit = self.pools[name].limit
            if limit is not None and self._promised[name].sum() + pages > limit:
                return None
        row = self._free_rows.pop()
        for name, pages in need.items():
            self._promised[name][row] = pages
        return row

    def extend(self, rows: Ints, start: Ints, stop: Ints) -> None:
        """Give table rows `rows` the pages that a step over tokens [start, stop) reads and writes."""
        for group in self.groups:
            first = start if group.retention is None else np.maximum(start - group.retention, 0)
            write = np.maximum(start, stop - group.retention) if group.carries and group.retention else start
            self._hold(group, rows, first, write, stop)

    def settle(self, rows: Ints, stop: Ints) -> None:
        """Take back the pages behind the retention of sequences that now have `stop` tokens."""
        for group in self.groups:
            if group.retention is not None:
                self._hold(group, rows, np.maximum(stop - group.retention, 0), stop, stop)

    def tables(self, row: int) -> dict[str, NDArray[np.int32]]:
        """Page tables of a sequence by group, equally wide for every sequence (logical page modulo width)."""
        return {name: table[row] for name, table in self._tables.items()}

    def release(self, row: int) -> None:
        """Take back all pages and the table row."""
        for group in self.groups:
            first, stop = self._live[group.name][:, row].tolist()
            self._drop(group, row, first, stop)
            self._live[group.name][:, row] = 0
            self._promised[group.name][row] = 0
        self._free_rows.append(row)

    def _hold(self, group: Group, rows: Ints, first_token: Ints, write_token: Ints, stop_token: Ints) -> None:
        """Hold the pages of tokens from `first_token` on that are there, and of [write_token, stop_token)."""
        live_first, live_stop = self._live[group.name][:, rows]
        per_page = group.tokens_per_row * group.page_rows
        first = live_first if group.retention is None else first_token // per_page
        stop = -(-(stop_token // group.tokens_per_row) // group.page_rows)
        for i in np.flatnonzero((first > live_first) | (stop > live_stop)):
            row = int(rows[i])
            self._drop(group, row, int(live_first[i]), min(int(first[i]), int(live_stop[i])))
            self._add(group, row, max(int(live_stop[i]), int(write_token[i]) // per_page), int(stop[i]))
            self._live[group.name][:, row] = first[i], max(stop[i], live_stop[i])

    def _add(self, group: Group, row: int, first: int, stop: int) -> None:
        if first < stop:
            table = self._widened(group, stop)
            table[row, np.arange(first, stop) % table.shape[1]] = self.pools[group.name].take(stop - first)

    def _drop(self, group: Group, row: int, first: int, stop: int) -> None:
        if first < stop:
            table = self._tables[group.name]
            columns = np.arange(first, stop) % table.shape[1]
            pages = table[row, columns]
            self.pools[group.name].give_back(pages[pages >= 0].tolist())
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
            f"cache_bytes is {cache_bytes:,}, but the windows of {max_sequences} sequences take {cache_bytes - left:,} "
            f"and one full step another {int(token_bytes * step_tokens):,}; raise cache_bytes or lower max_sequences"
        )
    for group in pools:
        affordable = tokens // (group.tokens_per_row * group.page_rows)
        limits[group.name] = min(max_sequences * group.pages_for(max_length), max(1, affordable))
    return limits
