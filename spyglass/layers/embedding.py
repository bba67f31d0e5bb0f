"""Token embeddings, and the leaf for tensors that are no matrix: sinks, biases, learned vectors, tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from spyglass.errors import CheckpointError
from spyglass.layers.build import Build
from spyglass.quant.codec import decode
from spyglass.quant.packed import Packed, WeightSlot


class Embedding(nn.Module):
    """Rows of a [V, C] table by id."""

    def __init__(self, name: str, num_rows: int, dim: int, build: Build) -> None:
        super().__init__()
        self.name = name
        self.shape = (num_rows, dim)
        self.weight_VC: torch.Tensor | None = None
        self._build = build

    def slots(self) -> list[WeightSlot]:
        return [WeightSlot(self.name, self.shape, "matrix", self._put)]

    def _put(self, weight: Packed) -> None:
        plain = weight.data if weight.format.block is None else decode(weight)
        self.weight_VC = plain.to(self._build.device)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Rows [T, C] in the activation dtype; a negative id gives the row of id 0, which the caller overwrites."""
        assert self.weight_VC is not None
        return self.weight_VC.index_select(0, ids_T.clamp(min=0)).to(self._build.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSpec:
    """A tensor that is used as it is: checkpoint name, shape, dtype it is held in.

    `kind` as in `WeightSlot`; an "index" table's entries must lie in 0 .. below - 1. `optional`: it may be absent.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    kind: Literal["matrix", "vector", "index"] = "vector"
    below: int = 0
    optional: bool = False


class PlainTensor(nn.Module):
    """Holder of one such tensor; `value` is None until it is loaded."""

    def __init__(self, spec: PlainSpec, build: Build) -> None:
        super().__init__()
        self.spec = spec
        self.value: torch.Tensor | None = None
        self._device = build.device

    def slots(self) -> list[WeightSlot]:
        spec = self.spec
        return [WeightSlot(spec.name, spec.shape, spec.kind, self._put, spec.optional)]

    def _put(self, found: Packed) -> None:
        if self.spec.kind == "index":
            _refuse_outside(self.spec.name, found.data, self.spec.below)
        plain = found.data if found.format.block is None else decode(found, torch.float32)
        self.value = plain.to(self._device, self.spec.dtype)

    def tensor(self) -> torch.Tensor:
        """The loaded tensor."""
        assert self.value is not None, f"{self.spec.name} was never loaded"
        return self.value


def _refuse_outside(name: str, data: torch.Tensor, below: int) -> None:
    low, high = int(data.min()), int(data.max())
    if low < 0 or high >= below:
        raise CheckpointError(f"{name} holds {low if low < 0 else high}; its entries must lie in 0..{below - 1}")
