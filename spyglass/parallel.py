"""Several processes on one model. The only file that imports `torch.distributed`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """This process among `count`, and what they do together."""

    rank: int = 0
    count: int = 1

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all processes, in each of them."""
        return value

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of which processes may hold parts, whole."""
        return tensor

    def like(self, leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """A whole `value` as this process holds `leaf`; what has another shape than `leaf` (a step count) stays."""
        return value

    def fill(self, leaf: torch.Tensor, value: torch.Tensor) -> None:
        """Overwrite `leaf`, in place, with a whole `value`."""
        leaf.copy_(value)
