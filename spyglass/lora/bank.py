"""Banks: the adapters of one linear map, each by its id.

A bank is plain tensors. What trains is what serves: where they want a gradient, the same addend is differentiable.
Rank rows lie one after another, so adapters of different ranks share a bank, and only those that occur cost anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import dropout

from spyglass.layers.build import BuildContext
from spyglass.ops.experts_grouped.adapters import ExpertAdapters, ExpertRanks
from spyglass.ops.lora_delta.rank_rows import RankRows

MATRICES = ("w1", "w2", "w3")


@dataclass(slots=True)
class Dropout:
    """Share of an adapter's inputs that is dropped; 0 but while training."""

    share: float = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x, self.share) if self.share > 0 else x


@dataclass(frozen=True, slots=True)
class Rows:
    """Rank rows: `a_RI` [R, in], `b_RO` [R, out], `scale_R` fp32, and the adapter each belongs to (int32)."""

    a_RI: torch.Tensor
    b_RO: torch.Tensor
    scale_R: torch.Tensor
    adapter_R: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.a_RI, self.b_RO, self.scale_R, self.adapter_R


def make_rows(a_RI: torch.Tensor, b_RO: torch.Tensor, scales: Sequence[float], adapter_id: int) -> Rows:
    """Rows of one adapter on the device of `a_RI`; `scales` one per row."""
    scale_R = torch.tensor(scales, dtype=torch.float32, device=a_RI.device)
    return Rows(a_RI, b_RO, scale_R, torch.full((len(a_RI),), adapter_id, dtype=torch.int32, device=a_RI.device))


def _join(parts: Sequence[Rows]) -> Rows:
    """All rows; those of a single adapter stay the very tensors they are, so that gradients reach them."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*((part.a_RI, part.b_RO, part.scale_R, part.adapter_R) for part in parts), strict=True)
    return Rows(*(torch.cat(column) for column in columns))


class LinearBank:
    """The adapters of one `Linear` or `GroupedLinear` (`layers.linear.Adapter`). `groups` 1 for a dense map."""

    def __init__(self, build: BuildContext, dropout: Dropout, groups: int = 1) -> None:
        self._delta, self._dropout, self._groups = build.ops.lora_delta, dropout, groups
        self._joins = build.ops.can("linear_block" if groups == 1 else "linear_grouped", "joins_rank_rows")
        self._version = build.version
        self.by_adapter: dict[int, Rows] = {}
        self._rows: Rows | None = None

    @property
    def adapter_ids(self) -> tuple[int, ...]:
        return tuple(self.by_adapter)

    def put(self, adapter_id: int, rows: Rows) -> None:
        """Add an adapter. A step that runs meanwhile sees the bank before or after, never between."""
        parts = {**self.by_adapter, adapter_id: rows}
        self.by_adapter, self._rows = parts, _join(list(parts.values()))
        self._version.bump()

    def swap(self, adapter_id: int, a_RI: torch.Tensor, b_RO: torch.Tensor) -> None:
        """Put other tensors of the same shapes in an adapter's place."""
        self.put(adapter_id, replace(self.by_adapter[adapter_id], a_RI=a_RI, b_RO=b_RO))

    def remove(self, adapter_id: int) -> None:
        parts = {number: rows for number, rows in self.by_adapter.items() if number != adapter_id}
        self.by_adapter, self._rows = parts, _join(list(parts.values())) if parts else None
        self._version.bump()

    def tensors(self) -> Iterator[torch.Tensor]:
        return iter(()) if self._rows is None else iter(self._rows.tensors())

    def __call__(self, x_TI: torch.Tensor, adapter_T: torch.Tensor) -> Any:
        """See `layers.linear.Adapter`; `RankRows` where the map takes them into its product."""
        rows = self._rows
        if rows is None:
            return None
        x_TGI = self._dropout(x_TI).reshape(len(adapter_T), self._groups, -1)
        b_RGO = rows.b_RO.unflatten(1, (self._groups, -1))
        if self._joins:
            return RankRows(
                x_TGI=x_TGI,
                adapter_T=adapter_T,
                a_RI=rows.a_RI,
                b_RGO=b_RGO,
                adapter_R=rows.adapter_R,
                scale_R=rows.scale_R,
            )
        delta_TGO: torch.Tensor = self._delta(x_TGI, adapter_T, rows.a_RI, b_RGO, rows.adapter_R, rows.scale_R)
        return delta_TGO if x_TI.dim() == 3 else delta_TGO.flatten(1)


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rank rows of all experts for one matrix of one adapter, expert after expert; `ranks_E` says how many each has."""

    rows: Rows
    ranks_E: tuple[int, ...]


class ExpertsBank:
    """The adapters of the routed experts of one layer (`layers.linear.ExpertsAdapter`)."""

    def __init__(self, build: BuildContext, dropout: Dropout) -> None:
        self._dropout, self._version = dropout, build.version
        self.by_adapter: dict[int, Mapping[str, ExpertRows]] = {}
        self._joined: ExpertAdapters | None = None

    @property
    def adapter_ids(self) -> tuple[int, ...]:
        return tuple(self.by_adapter)

    def put(self, adapter_id: int, parts: Mapping[str, ExpertRows]) -> None:
        """Add an adapter: rank rows by matrix (w1, w2, w3)."""
        self._take({**self.by_adapter, adapter_id: parts})

    def swap(self, adapter_id: int, matrix: str, a_RI: torch.Tensor, b_RO: torch.Tensor) -> None:
        """Put other tensors of the same shapes in place of those of one matrix of an adapter."""
        part = self.by_adapter[adapter_id][matrix]
        self.put(
            adapter_id,
            {**self.by_adapter[adapter_id], matrix: replace(part, rows=replace(part.rows, a_RI=a_RI, b_RO=b_RO))},
        )

    def remove(self, adapter_id: int) -> None:
        self._take({number: parts for number, parts in self.by_adapter.items() if number != adapter_id})

    def tensors(self) -> Iterator[torch.Tensor]:
        if self._joined is not None:
            yield self._joined.adapter_A
            for ranks in self._joined.matrices.values():
                yield from (ranks.a_RI, ranks.b_RO, ranks.scale_R, ranks.start_AE1)

    def __call__(self) -> ExpertAdapters | None:
        """See `layers.linear.ExpertsAdapter`. While one of several trains they are joined anew in every pass."""
        if self._joined is None and self.by_adapter:
            return _join_experts(self.by_adapter, self._dropout.share)
        return self._joined if self._joined is None else replace(self._joined, dropout=self._dropout.share)

    def _take(self, parts: dict[int, Mapping[str, ExpertRows]]) -> None:
        """What never changes is joined once, and the parts become views of that: it may be gigabytes."""
        learns = any(part.rows.a_RI.requires_grad for each in parts.values() for part in each.values())
        self._joined = None if learns or not parts else _join_experts(parts, 0.0)
        if self._joined is not None and len(parts) > 1:
            parts = {
                adapter_id: _views(self._joined, number, each)
                for number, (adapter_id, each) in enumerate(parts.items())
            }
        self.by_adapter = parts
        self._version.bump()


def _join_experts(parts: Mapping[int, Mapping[str, ExpertRows]], dropout: float) -> ExpertAdapters:
    rows = [part.rows for each in parts.values() for part in each.values()]
    dtypes = {tensor.dtype for one in rows for tensor in (one.a_RI, one.b_RO)}
    dtype = torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32
    num_experts = max(len(part.ranks_E) for each in parts.values() for part in each.values())
    device = rows[0].a_RI.device
    matrices = {}
    for matrix in MATRICES:
        found = [each[matrix] for each in parts.values() if matrix in each]
        if not found:
            continue
        joined = _join([part.rows for part in found])
        ranks = [each[matrix].ranks_E if matrix in each else (0,) * num_experts for each in parts.values()]
        last = np.cumsum([0, *(n for ranks_E in ranks for n in ranks_E)])
        start = [last[s * num_experts : (s + 1) * num_experts + 1] for s in range(len(ranks))]
        matrices[matrix] = ExpertRanks(
            joined.a_RI.to(dtype).contiguous(),
            joined.b_RO.to(dtype).contiguous(),
            joined.scale_R,
            torch.from_numpy(np.stack(start).astype(np.int32)).to(device),
            tuple(ranks),
        )
    return ExpertAdapters(torch.tensor(list(parts), dtype=torch.int32, device=device), matrices, dropout)


def _views(joined: ExpertAdapters, number: int, parts: Mapping[str, ExpertRows]) -> dict[str, ExpertRows]:
    out = {}
    for matrix, part in parts.items():
        ranks = joined.matrices[matrix]
        first = sum(map(sum, ranks.ranks_AE[:number]))
        kept = slice(first, first + len(part.rows.a_RI))
        rows = replace(part.rows, a_RI=ranks.a_RI[kept], b_RO=ranks.b_RO[kept], scale_R=ranks.scale_R[kept])
        out[matrix] = replace(part, rows=rows)
    return out
