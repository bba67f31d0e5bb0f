"""The processes among which the weights of one model are divided, and what they do together inside a step.

Every sum is made in the order of the ranks from the parts of all, in the dtype of the parts: so each process gets the
same bits, and a row's do not depend on what else is in the step, nor on how large it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Group:
    """One process alone: what it has is the whole. `capturable`: a captured graph can hold what is done together."""

    rank = 0
    size = 1
    capturable = True

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def total(
        self, routed_TC: torch.Tensor, shared_TC: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Two summands over all processes, fp32 and anything; or their sum, in `dtype`, where it was needed anyway."""
        return routed_TC, shared_TC

    def join(self, part_RO: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Columns of all processes beside one another, of which each has so many."""
        return part_RO

    def largest(self, ids_R: torch.Tensor, values_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each process's largest value and its id, the largest and its id; the lowest id of equals. NaN is large."""
        return ids_R, values_R

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite a contiguous tensor with that of rank 0."""
        return tensor

    def close(self) -> None:
        """Let go of the others."""


ALONE = Group()
