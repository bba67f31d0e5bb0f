"""Token embeddings, and the leaf for tensors that are no matrix: sinks, biases, learned vectors, tables."""

from __future__ import annotations

from dataclasses import dataclass

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
    """A tensor that is used as it is: full checkpoint name, shape, dtype it is held in.

    `below`: entries of an index table must lie in 0 .. below - 1. `optional`: the checkpoint may lack it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    below: int | None = None
    optional: bool = False


class PlainTensor(nn.Module):
    """Holder of one such tensor; `value` is None until it is loaded."""

    def __init__(self, spec: PlainSpec, build: Build) -> None:
        super().__init__()
        self.spec = spec
        self.value: torch.Tensor | None = None
        self._device = build.device

    def slots(self) -> list[WeightSlot]:
        kind = "vector" if self.spec.below is None else "index"
        return [WeightSlot(self.spec.name, self.spec.shape, kind, self._put, self.spec.optional)]

    def _put(self, found: Packed) -> None:
        if self.spec.below is not None:
            _refuse_outside(self.spec.name, found.data, self.spec.below)
        self.value = found.data.to(self._device, self.spec.dtype)

    def tensor(self) -> torch.Tensor:
        """The loaded tensor."""
        assert self.value is not None, f"{self.spec.name} was never loaded"
        return self.value


def _refuse_outside(name: str, data: torch.Tensor, below: int) -> None:
    low, high = int(data.min()), int(data.max())
    if low < 0 or high >= below:
        raise CheckpointError(f"{name} holds {low if low < 0 else high}; its entries must lie in 0..{below - 1}")
