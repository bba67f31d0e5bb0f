"""What a row goes through before it is stored or compared: norm, rotation, rounding (spec v4 2.5, 4.2, 5.1, 5.5).

Attention rows: FP8 on the plain channels, the rotary ones stored as bf16. Index rows: Hadamard, then FP4. In plain
numerics nothing is rounded.
"""

from __future__ import annotations

from typing import Literal

import torch

from spyglass.layers.norm import RMSNorm
from spyglass.text.step import LayerContext, Tables


class RowFinish:
    """Rows of the window, compressed rows ("pool"), or index queries and keys ("index")."""

    def __init__(self, ctx: LayerContext, which: Literal["window", "pool", "index"]) -> None:
        rounding = ctx.rounding
        self._finish = ctx.build.ops.row_finish
        self.quant = {"window": rounding.window, "pool": rounding.pool, "index": rounding.index}[which]
        dim = ctx.text.index_head_dim if which == "index" else ctx.text.head_dim
        self.format = rounding.stored_row(which, dim)  # of the rows in pages of bytes
        self._hadamard = which == "index" and rounding.hadamard
        self._dims = None if which == "index" else rounding.kv_dims
        self._tail_bf16 = which != "index" and rounding.rope_dims_bf16

    def __call__(
        self,
        x_THD: torch.Tensor,
        tables: Tables,
        *,
        norm: RMSNorm | None = None,
        pages_NBD: torch.Tensor | None = None,
        write_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The values that are compared, in x's dtype, or written into `pages_NBD`: as codes where those are bytes."""
        return self._finish(
            x_THD,
            *tables,
            weight_D=None if norm is None else norm.weight_D,
            eps=None if norm is None else norm.eps,
            hadamard=self._hadamard,
            quant=self.quant,
            dims=self._dims,
            tail_bf16=self._tail_bf16,
            pages_NBD=pages_NBD,
            write_T=write_T,
        )
