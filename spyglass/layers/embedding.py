"""Token embeddings, and the leaf for tensors that are no matrix: sinks, biases, learned vectors, tables."""

from __future__ import annotations

import torch
from torch import nn

from spyglass.errors import CheckpointError
from spyglass.layers.build import BuildContext
from spyglass.quant.codec import decode
from spyglass.quant.packed import Packed, WeightSlot


class Embedding(nn.Module):
    """Rows of a [V, C] table by id."""

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__()
        self.name = name
        self.shape, self._rows = build.param(name).shape, build.rows(name)
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
        build, ids_T = self._build, ids_T.clamp(min=0)
        if build.group.size == 1:
            return self.weight_VC.index_select(0, ids_T).to(build.dtype)
        row_T = ids_T - self._rows.start
        absent_T1 = ((row_T < 0) | (row_T >= len(self._rows)))[:, None]
        found_TC = self.weight_VC.index_select(0, row_T.clamp(0, len(self._rows) - 1)).to(build.dtype)
        return build.group.sum(found_TC.masked_fill(absent_T1, 0.0))  # one summand is not 0


class PlainTensor(nn.Module):
    """A parameter that is used as it is, held in `dtype`; `value` is None until it is loaded.

    The entries of an "index" parameter are numbers of experts.
    """

    def __init__(self, build: BuildContext, name: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.name = name
        self.value: torch.Tensor | None = None
        self._param = build.param(name)
        self._dtype = dtype
        self._device = build.device

    def slots(self) -> list[WeightSlot]:
        param = self._param
        return [WeightSlot(self.name, param.shape, param.kind, self._put, param.optional)]

    def _put(self, found: Packed) -> None:
        if self._param.kind == "index":
            low, high, count = int(found.data.min()), int(found.data.max()), self._param.num_experts
            if low < 0 or high >= count:
                outside = low if low < 0 else high
                raise CheckpointError(f"{self.name} holds {outside}; its entries must lie in 0..{count - 1}")
        plain = found.data if found.format.block is None else decode(found, torch.float32)
        self.value = plain.to(self._device, self._dtype)

    def tensor(self) -> torch.Tensor:
        assert self.value is not None, f"{self.name} was never loaded"
        return self.value
