"""Banks: the adapters of one linear map, each in its slot.

A bank is plain tensors. What trains is what serves: where they want a gradient, the same addend is differentiable.
Rank rows lie one after another, so adapters of different ranks share a bank, and only slots that occur cost anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import dropout

from spyglass.layers.adapted import ExpertsDelta
from spyglass.layers.build import Build
from spyglass.ops.experts_grouped.reference import ExpertPair

MATRICES = ("w1", "w2", "w3")


@dataclass(slots=True)
class Dropout:
    """Share of an adapter's inputs that is dropped; 0 but while training."""

    share: float = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x, self.share) if self.share > 0 else x


@dataclass(frozen=True, slots=True)
class Rows:
    """Rank rows: `a_RI` [R, in], `b_RO` [R, out], `scale_R` fp32, and the slot each belongs to (int32)."""

    a_RI: torch.Tensor
    b_RO: torch.Tensor
    scale_R: torch.Tensor
    slot_R: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.a_RI, self.b_RO, self.scale_R, self.slot_R

    def select(self, keep_R: torch.Tensor) -> Rows:
        """The rows where `keep_R` (bool) holds."""
        return Rows(self.a_RI[keep_R], self.b_RO[keep_R], self.scale_R[keep_R], self.slot_R[keep_R])


def make_rows(a_RI: torch.Tensor, b_RO: torch.Tensor, scales: Sequence[float], slot: int) -> Rows:
    """Rows of one adapter on the device of `a_RI`; `scales` one per row."""
    scale_R = torch.tensor(scales, dtype=torch.float32, device=a_RI.device)
    return Rows(a_RI, b_RO, scale_R, torch.full((len(a_RI),), slot, dtype=torch.int32, device=a_RI.device))


def _join(parts: Sequence[Rows]) -> Rows:
    """All rows; those of a single adapter stay the very tensors they are, so that gradients reach them."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*((part.a_RI, part.b_RO, part.scale_R, part.slot_R) for part in parts), strict=True)
    return Rows(*(torch.cat(column) for column in columns))


class LinearBank:
    """The adapters of one `Linear` or `GroupedLinear` (`layers.linear.Adapter`). `groups` 1 for a dense map."""

    def __init__(self, build: Build, dropout: Dropout, groups: int = 1) -> None:
        self._delta, self._dropout, self._groups = build.ops.lora_delta, dropout, groups
        self._version = build.version
        self._parts: dict[int, Rows] = {}
        self._rows: Rows | None = None

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots that hold something."""
        return tuple(self._parts)

    def put(self, slot: int, rows: Rows) -> None:
        """Add an adapter. A step that runs meanwhile sees the bank before or after, never between."""
        parts = {**self._parts, slot: rows}
        self._parts, self._rows = parts, _join(list(parts.values()))
        self._version.bump()

    def swap(self, slot: int, a_RI: torch.Tensor, b_RO: torch.Tensor) -> None:
        """Put other tensors of the same shapes in an adapter's place."""
        self.put(slot, replace(self._parts[slot], a_RI=a_RI, b_RO=b_RO))

    def remove(self, slot: int) -> None:
        """Take one out, if it is there."""
        parts = {number: rows for number, rows in self._parts.items() if number != slot}
        self._parts, self._rows = parts, _join(list(parts.values())) if parts else None
        self._version.bump()

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that a step reads."""
        return iter(()) if self._rows is None else iter(self._rows.tensors())

    def __call__(self, x_TI: torch.Tensor, slot_T: torch.Tensor) -> torch.Tensor | None:
        """See `layers.linear.Adapter`. On a GPU nothing is read back, so rows of absent slots are multiplied too."""
        rows = self._rows
        if rows is None:
            return None
        if not x_TI.is_cuda:
            keep_R = torch.isin(rows.slot_R, slot_T)
            if not keep_R.any():
                return None
            rows = rows if keep_R.all() else rows.select(keep_R)
        x_TGI = self._dropout(x_TI).reshape(len(slot_T), self._groups, -1)
        b_RGO = rows.b_RO.unflatten(1, (self._groups, -1))
        delta_TGO: torch.Tensor = self._delta(x_TGI, slot_T, rows.a_RI, b_RGO, rows.slot_R, rows.scale_R)
        return delta_TGO if x_TI.dim() == 3 else delta_TGO.flatten(1)


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rank rows of all experts for one matrix of one adapter, expert after expert; `ranks_E` says how many each has."""

    rows: Rows
    ranks_E: tuple[int, ...]

    def pages(self) -> list[Rows]:
        """The rows of each expert, as views; cut in one piece, so that their gradients are joined once."""
        rows, ranks = self.rows, list(self.ranks_E)
        parts = (tensor.split(ranks) for tensor in (rows.a_RI, rows.b_RO, rows.scale_R, rows.slot_R))
        return [Rows(*page) for page in zip(*parts, strict=True)]

    def pair(self, dropout: float) -> ExpertPair:
        """All experts as three tensors; their ranks are the same."""
        rows, size = self.rows, (len(self.ranks_E), -1)
        a_ERI, b_ERO = (tensor.unflatten(0, size) for tensor in (rows.a_RI, rows.b_RO))
        return ExpertPair(a_ERI, b_ERO, rows.scale_R.view(size), dropout)


class ExpertsBank:
    """The adapters of the routed experts of one layer (`layers.adapted.ExpertsAdapter`)."""

    def __init__(self, build: Build, dropout: Dropout) -> None:
        self._delta, self._dropout, self._version = build.ops.lora_delta, dropout, build.version
        self._parts: dict[int, Mapping[str, ExpertRows]] = {}
        self._pages: dict[int, Mapping[str, list[Rows]]] = {}

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots that hold something."""
        return tuple(self._parts)

    def put(self, slot: int, parts: Mapping[str, ExpertRows]) -> None:
        """Add an adapter: rank rows by matrix (w1, w2, w3). Pages of tensors that never change are cut here."""
        frozen = not any(part.rows.a_RI.requires_grad for part in parts.values())
        if frozen:
            self._pages = {**self._pages, slot: {matrix: part.pages() for matrix, part in parts.items()}}
        self._parts = {**self._parts, slot: parts}
        self._version.bump()

    def swap(self, slot: int, matrix: str, a_RI: torch.Tensor, b_RO: torch.Tensor) -> None:
        """Put other tensors of the same shapes in place of those of one matrix of an adapter."""
        part = self._parts[slot][matrix]
        self.put(slot, {**self._parts[slot], matrix: replace(part, rows=replace(part.rows, a_RI=a_RI, b_RO=b_RO))})

    def remove(self, slot: int) -> None:
        """Take one out, if it is there."""
        self._parts = {number: parts for number, parts in self._parts.items() if number != slot}
        self._pages = {number: pages for number, pages in self._pages.items() if number != slot}
        self._version.bump()

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that a step reads."""
        return iter([t for parts in self._parts.values() for part in parts.values() for t in part.rows.tensors()])

    def adapted(self, slot_T: torch.Tensor) -> torch.Tensor:
        """See `ExpertsAdapter`."""
        return torch.isin(slot_T, torch.tensor(self.slots, dtype=slot_T.dtype, device=slot_T.device))

    def pairs(self) -> Mapping[str, ExpertPair] | None:
        """See `ExpertsAdapter`."""
        if len(self._parts) != 1:
            return None
        (parts,) = self._parts.values()
        if any(len(set(part.ranks_E)) != 1 for part in parts.values()):
            return None
        found = [(matrix, parts[matrix]) for matrix in MATRICES if matrix in parts]
        return {matrix: part.pair(self._dropout.share) for matrix, part in found}

    def deltas(self) -> ExpertsDelta:
        """See `ExpertsAdapter`."""
        pages = {
            slot: self._pages[slot] if slot in self._pages else {m: part.pages() for m, part in parts.items()}
            for slot, parts in self._parts.items()
        }

        def delta(matrix: str, expert: int, x_NI: torch.Tensor, slot_N: torch.Tensor) -> torch.Tensor | None:
            total: torch.Tensor | None = None
            for slot, found in pages.items():
                rows = found[matrix][expert] if matrix in found else None
                if rows is None or len(rows.a_RI) == 0 or not (slot_N == slot).any():
                    continue
                x_N1I, b_R1O = self._dropout(x_NI)[:, None], rows.b_RO[:, None]
                added = self._delta(x_N1I, slot_N, rows.a_RI, b_R1O, rows.slot_R, rows.scale_R)[:, 0]
                total = added if total is None else total + added
            return total

        return delta
