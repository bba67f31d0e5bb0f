"""Adapters beside the matrices of routed experts, as the implementations of this op take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """Rank rows beside one matrix of every expert: `a_RI`, `b_RO` and a factor fp32 each.

    Adapter by adapter, expert by expert: those of adapter s and expert e are rows `start_AE1[s, e]` ..
    `start_AE1[s, e + 1]` (int32). `ranks_AE` are their numbers, on the host.
    """

    a_RI: torch.Tensor
    b_RO: torch.Tensor
    scale_R: torch.Tensor
    start_AE1: torch.Tensor
    ranks_AE: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """All adapters of a layer's experts: `adapter_A` (int32) says which row of a step takes which; none is 0.

    `matrices` has some of w1, w2, w3. `dropout` is the share of an adapter's inputs that is dropped.
    """

    adapter_A: torch.Tensor
    matrices: Mapping[str, ExpertRanks]
    dropout: float = 0.0


class Addends:
    """What adapters add to the products of experts, for rows of one expert at a time.

    The rank rows of a matrix are cut in one piece, so that their gradients are joined once.
    """

    def __init__(self, adapters: ExpertAdapters) -> None:
        self._adapters = adapters
        self._cut = {
            matrix: list(
                zip(*(t.split([n for each in ranks.ranks_AE for n in each]) for t in _rows(ranks)), strict=True)
            )
            for matrix, ranks in adapters.matrices.items()
        }

    def __call__(self, matrix: str, expert: int, x_NI: torch.Tensor, adapter_N: torch.Tensor) -> torch.Tensor | None:
        """Σ_r scale_r (a_r · x) b_r over the rank rows of each row's adapter, fp32 [N, O]; None if none has any."""
        if matrix not in self._cut:
            return None
        ranks_AE = self._adapters.matrices[matrix].ranks_AE
        total: torch.Tensor | None = None
        for number, ranks_E in enumerate(ranks_AE):
            if not ranks_E[expert]:
                continue
            a_RI, b_RO, scale_R = self._cut[matrix][number * len(ranks_E) + expert]
            x_ND = torch.nn.functional.dropout(x_NI, self._adapters.dropout).float()
            u_NR = (x_ND @ a_RI.float().mT) * scale_R
            u_NR = torch.where((adapter_N == self._adapters.adapter_A[number])[:, None], u_NR, 0.0)
            added = u_NR @ b_RO.float()
            total = added if total is None else total + added
        return total


def _rows(ranks: ExpertRanks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return ranks.a_RI, ranks.b_RO, ranks.scale_R
