"""Where a row that will be stored is rounded on purpose (spec v4 2.5, 4.2, 5.1, 5.5).

Attention rows: FP8 on the plain channels, the rotary ones stored as bf16. Index rows: Hadamard, then FP4.
"""

from __future__ import annotations

from typing import Literal

import torch

from spyglass.ops.table import Ops
from spyglass.text.step import TextBuild


class RowRounding:
    """Window rows ("window") and compressed rows ("pool"); unchanged in plain numerics."""

    def __init__(self, parts: TextBuild, which: Literal["window", "pool"]) -> None:
        rounding = parts.rounding
        self._ops: Ops = parts.build.ops
        self._quant = rounding.window if which == "window" else rounding.pool
        self._dims = rounding.kv_dims
        self._tail_bf16 = rounding.rope_dims_bf16

    def __call__(self, row_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] after rotation, to the values that are stored, in the same dtype."""
        if self._quant is None:
            return row_TD
        out: torch.Tensor = self._ops.fake_quant(row_TD, self._quant, dims=self._dims, tail_bf16=self._tail_bf16)
        return out


class IndexRounding:
    """Index queries and keys; unchanged in plain numerics."""

    def __init__(self, parts: TextBuild) -> None:
        self._ops: Ops = parts.build.ops
        self._quant = parts.rounding.index
        self._hadamard = parts.rounding.hadamard

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        """[..., I] after rotation to the values that are scored, in the same dtype."""
        if self._hadamard:
            x_NI = self._ops.hadamard(x_NI)
        if self._quant is not None:
            x_NI = self._ops.fake_quant(x_NI, self._quant)
        return x_NI
