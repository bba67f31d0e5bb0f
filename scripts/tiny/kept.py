"""Training steps that stay on the device, so that it need not wait for fresh ones."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

MOST_USES = 4


@dataclass(slots=True)
class Kept:
    """Steps on the device: fresh ones replace the oldest; the rest are repeated, the least used first.

    On a GPU they are copied on a stream of their own, beside the steps that are being learned. Their memory belongs to
    that stream: what the allocator hands out on the other may still be written by work that waits there. A place is
    written again once its last use is over.
    """

    device: torch.device
    most: int
    steps: list[dict[str, torch.Tensor]] = field(default_factory=list)
    uses: list[int] = field(default_factory=list)
    last_use: dict[int, Any] = field(default_factory=dict)
    oldest: int = 0
    stream: Any = None

    def add(self, tensors: dict[str, torch.Tensor]) -> int:
        """Copy a step to the device; its number here."""
        on_gpu = self.device.type == "cuda"
        if on_gpu and self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self.stream) if on_gpu else torch.no_grad():
            place = self._place(tensors)
            if on_gpu and place in self.last_use:
                self.stream.wait_event(self.last_use[place])
            for name, tensor in self.steps[place].items():
                tensor.copy_(tensors[name])
        if on_gpu:
            self.stream.synchronize()
        return place

    def _place(self, tensors: dict[str, torch.Tensor]) -> int:
        if len(self.steps) < self.most:
            self.steps.append({name: torch.empty_like(tensor, device=self.device) for name, tensor in tensors.items()})
            self.uses.append(0)
            return len(self.steps) - 1
        place, self.oldest = self.oldest, (self.oldest + 1) % self.most
        self.uses[place] = 0
        return place

    def used(self, place: int) -> None:
        """The step was handed to the device on the current stream."""
        self.uses[place] += 1
        if self.device.type == "cuda":
            self.last_use[place] = torch.cuda.Event()
            self.last_use[place].record()

    def repeat(self, source: random.Random) -> int | None:
        """A step that may be used again; None if all are used up."""
        least = min(self.uses, default=MOST_USES)
        if least >= MOST_USES:
            return None
        return source.choice([place for place, uses in enumerate(self.uses) if uses == least])
