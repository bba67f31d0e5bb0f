"""The tensors that rows of sequences lie in, and the copies of rows that snapshots keep.

All that changes them beside the model's own writes is one of a few operations with numbers as arguments, so that
processes which hold the same rows can do the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.config.cache import CachePlan
from spyglass.engine.cache.pages import Group
from spyglass.engine.transfer import to_device

Key = tuple[str, int]  # kind and layer of a `CachePlan`


class PageMemory:
    """Row tensors [num_pages, page_rows, row_dim] of each group, without pages at first.

    `fill` poisons fresh pages, and those that `clear` is told (tests).
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

    @property
    def pages(self) -> dict[Key, torch.Tensor]:
        """All row tensors."""
        return {key: tensor for tensors in self.by_group.values() for key, tensor in tensors.items()}

    @torch.inference_mode(False)  # pages outlive the step that makes them grow
    def resize(self, name: str, capacity: int) -> None:
        """Give a group so many pages, at least those that it has."""
        group, tensors = self.groups[name], self.by_group[name]
        for plan in group.plans:
            held = tensors[plan.kind, plan.layer]
            tensors[plan.kind, plan.layer] = grown = self._new(group, plan, capacity)
            grown[: len(held)] = held

    def copy(self, name: str, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` rows of a page into another."""
        for tensor in self.by_group[name].values():
            tensor[target, :rows] = tensor[source, :rows]

    def clear(self, name: str, pages: Sequence[int]) -> None:
        """Poison pages that nobody holds."""
        assert self._fill is not None
        for tensor in self.by_group[name].values():
            tensor[torch.as_tensor(pages, device=self._device)] = self._fill

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
        """Drop the copies of a snapshot."""
        self._kept.pop(number, None)

    def _new(self, group: Group, plan: CachePlan, capacity: int) -> torch.Tensor:
        dtype = self._dtype if plan.dtype == "activation" else torch.float32
        shape = (capacity, group.page_rows, plan.row_dim)
        grown = torch.empty(shape, dtype=dtype, device=self._device)
        return grown if self._fill is None else grown.fill_(self._fill)
