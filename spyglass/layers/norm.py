"""Root-mean-square norm with a weight (spec v4 3.4)."""

from __future__ import annotations

import torch
from torch import nn

from spyglass.layers.build import BuildContext
from spyglass.quant.formats import FakeQuant
from spyglass.quant.packed import Packed, WeightSlot


class RMSNorm(nn.Module):
    """w · x · rsqrt(mean x² + eps) over the last axis. `name` is the native name without `.weight`."""

    def __init__(self, build: BuildContext, name: str, eps: float) -> None:
        super().__init__()
        self.name = name
        self.shape = build.param(f"{name}.weight").shape
        self.eps = eps
        self.weight_D: torch.Tensor | None = None
        self._device = build.device
        self._norm = build.ops.rms_norm

    def slots(self) -> list[WeightSlot]:
        return [WeightSlot(f"{self.name}.weight", self.shape, "vector", self._put)]

    def _put(self, weight: Packed) -> None:
        self.weight_D = weight.data.to(self._device, torch.float32)

    def forward(self, x_ND: torch.Tensor, quant: FakeQuant | None = None) -> torch.Tensor:
        """[..., D] to the same shape and dtype; fp32 inside, one rounding, then `quant`."""
        return self._norm(x_ND, self.weight_D, eps=self.eps, quant=quant)
