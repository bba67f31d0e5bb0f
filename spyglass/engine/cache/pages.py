"""Pages of groups: how large they are, the memory they lie in, and who holds them. Knows groups, not models.

A page may have several holders (sequences and snapshots that share a prefix); it is free when the last lets go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.batch.rows import new_rows, poison
from spyglass.config.cache import CachePlan
from spyglass.engine.transfer import to_device

Key = tuple[str, int]  # kind and layer of a `CachePlan`

_PAGE_ROWS = 64
_POOL_PAGE_TOKENS = 512  # a page of a strongly compressed pool is kept short: one page should not outlast a chat


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
    assert {p.snapshot for p in plans} == {first.retention is not None}, f"{name}: rings are copied, pools shared"
    if first.retention is not None:
        rows = min(_PAGE_ROWS, max(1, first.retention))
    else:
        rows = max(1, min(_PAGE_ROWS, _POOL_PAGE_TOKENS // first.tokens_per_row))
    rows = page_rows.get(name, rows)
    row_bytes = sum(p.row_bytes(dtype.itemsize) for p in plans)
    return Group(
        name=name,
        plans=plans,
        page_rows=rows,
        tokens_per_row=first.tokens_per_row,
        retention=first.retention,
        page_bytes=rows * row_bytes,
        carries=first.kind in ("state", "index_state"),
    )


class PageMemory:
    """Row tensors [num_pages, page_rows, row_dim or bytes] of each group, without pages first, and copies of snapshots.

    All that changes them beside the model's own writes is one of these operations, with numbers as arguments, so that
    processes which hold the same rows can do the same. `fill` poisons fresh pages, and those `clear` is told (tests).

    `pages` has all row tensors, also by group; one that grew is replaced there, so a step between whose layers others
    run finds it.
    """

    def __init__(
        self, groups: Sequence[Group], dtype: torch.dtype, device: torch.device, fill: float | None = None
    ) -> None:
        self.groups = {group.name: group for group in groups}
        self._dtype, self._device, self._fill = dtype, device, fill
        self._kept: dict[int, dict[Key, torch.Tensor]] = {}
        self.by_group: dict[str, dict[Key, torch.Tensor]] = {
            group.name: {(plan.kind, plan.layer): self._new(group, plan, 0) for plan in group.plans} for group in groups
        }
        self.pages = {key: tensor for tensors in self.by_group.values() for key, tensor in tensors.items()}

    @torch.inference_mode(False)  # pages outlive the step that makes them grow
    def resize(self, name: str, capacity: int) -> None:
        """Give a group so many pages, at least those that it has."""
        group, tensors = self.groups[name], self.by_group[name]
        for plan in group.plans:
            held = tensors[plan.kind, plan.layer]
            tensors[plan.kind, plan.layer] = self.pages[plan.kind, plan.layer] = grown = self._new(
                group, plan, capacity
            )
            grown[: len(held)] = held

    def copy(self, name: str, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` rows of a page into another."""
        for tensor in self.by_group[name].values():
            tensor[target, :rows] = tensor[source, :rows]

    def clear(self, name: str, pages: Sequence[int]) -> None:
        """Poison pages that nobody holds."""
        assert self._fill is not None
        for tensor in self.by_group[name].values():
            tensor[torch.as_tensor(pages, device=self._device)] = poison(tensor.new_empty(()), self._fill)

    def keep(self, number: int, name: str, place_W: NDArray[np.int64]) -> None:
        """Copy these flat rows of a group under the number of a snapshot."""
        places, kept = to_device(place_W, self._device), self._kept.setdefault(number, {})
        for key, tensor in self.by_group[name].items():
            kept[key] = tensor.flatten(0, 1).index_select(0, places)

    def restore(self, number: int, name: str, place_W: NDArray[np.int64]) -> None:
        """Write what `keep` copied into these flat rows of the group."""
        places, kept = to_device(place_W, self._device), self._kept[number]
        for key, tensor in self.by_group[name].items():
            tensor.flatten(0, 1).index_copy_(0, places, kept[key])

    def forget(self, number: int) -> None:
        self._kept.pop(number, None)

    def _new(self, group: Group, plan: CachePlan, capacity: int) -> torch.Tensor:
        grown = new_rows(plan, (capacity, group.page_rows), self._dtype, self._device)
        return grown if self._fill is None else poison(grown, self._fill)


class PagePool:
    """Which pages of one group, in `memory`, are free. `limit` None = grows; `clears`: free pages are poisoned."""

    def __init__(self, group: Group, memory: PageMemory, limit: int | None, *, clears: bool) -> None:
        self.group = group
        self.limit = limit
        self.capacity = 0
        self._holders = np.zeros(0, np.int32)  # sequences and snapshots that hold a page
        self._memory, self._clears = memory, clears
        self._free: list[int] = []  # given back
        self._untouched = 0  # this page and all behind it have never been held
        if limit is not None:
            self._resize(limit)

    @property
    def num_free(self) -> int:
        """Pages that can be taken without growing."""
        return len(self._free) + self.capacity - self._untouched

    @property
    def num_used(self) -> int:
        """Pages that sequences and snapshots hold."""
        return self._untouched - len(self._free)

    def count_only_in(self, holders: NDArray[np.int32]) -> int:
        """Pages that nobody holds but those counted in `holders`, from page 0 on."""
        return int(np.count_nonzero((holders > 0) & (holders == self._holders[: len(holders)])))

    def held_once(self, pages: NDArray[np.int32]) -> bool:
        """Whether some of these pages have one holder only."""
        return bool((self._holders[pages] == 1).any())

    def only_in(self, holders: NDArray[np.int32], pages: NDArray[np.int32]) -> bool:
        """Whether nobody holds some of these pages but those counted in `holders`, from page 0 on."""
        return bool((holders[pages] == self._holders[pages]).any())

    def take(self, count: int) -> list[int]:
        """`count` page numbers. Never fails for a growing pool; a fixed one must have been asked first."""
        if count > self.num_free:
            assert self.limit is None, f"group {self.group.name} has no {count} free pages; the scheduler must not ask"
            self._resize(max(self.capacity + count - self.num_free, self.capacity * 3 // 2, 4))
        known = len(self._free) - min(count, len(self._free))
        taken = self._free[known:]
        del self._free[known:]
        fresh = count - len(taken)
        taken += range(self._untouched, self._untouched + fresh)
        self._untouched += fresh
        self._holders[taken] = 1
        return taken

    def share(self, pages: NDArray[np.int32]) -> None:
        """One more holder for each of these pages, all different. Whoever shares a page only reads it."""
        self._holders[pages] += 1

    def is_shared(self, page: int) -> bool:
        """Whether a page has several holders."""
        return bool(self._holders[page] > 1)

    def give_back(self, pages: NDArray[np.int32]) -> None:
        """One holder less; without any a page is free, and may be poisoned, so that a stale read shows."""
        self._holders[pages] -= 1
        free = pages[self._holders[pages] == 0].tolist()
        self._free.extend(free)
        if self._clears and free:
            self._memory.clear(self.group.name, free)

    def _resize(self, capacity: int) -> None:
        self._memory.resize(self.group.name, capacity)
        self._holders = np.append(self._holders, np.zeros(capacity - self.capacity, np.int32))
        self.capacity = capacity
