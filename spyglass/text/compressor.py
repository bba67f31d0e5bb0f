"""Compressed memory: `ratio` tokens become one row, pooled channel by channel (spec v4 5.1, 5.4; v41 4.5).

e_w = Σ_b softmax_b(gate_b + ape_b) · kv_b over the un-pooled rows of a group (and of the one before, where groups
overlap), then a norm and a rotation at the group's first position. Un-pooled rows are kept in fp32 until no group
needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from spyglass.batch.types import CacheView, CompressionStep
from spyglass.config.model import CompressorPlan
from spyglass.layers.embedding import PlainTensor
from spyglass.layers.linear import Linear
from spyglass.layers.merged import Projections
from spyglass.layers.norm import RMSNorm
from spyglass.text.rounding import RowFinish
from spyglass.text.step import LayerContext, Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorSpec:
    """Which compressor of which layer: native name, and the tensors of the cache it fills."""

    name: str
    layer: int
    pool: Literal["pool", "index"]
    state: Literal["state", "index_state"]


class Compressor(nn.Module):
    """The tensors `{name}.{wkv, norm}`, and `ape` and `wgate` where the plan has them.

    Projections, pooling and the stored rows are fp32; a compressor without gate copies rows and projects in the
    activation dtype.
    """

    def __init__(
        self,
        spec: CompressorSpec,
        plan: CompressorPlan,
        ctx: LayerContext,
        finish: RowFinish,
    ) -> None:
        super().__init__()
        build = ctx.build
        self.wkv = Linear(build, f"{spec.name}.wkv", fp32_out=plan.gated)
        self.wgate = Linear(build, f"{spec.name}.wgate", fp32_out=True) if plan.gated else None
        self.ape = PlainTensor(build, f"{spec.name}.ape") if plan.positional_bias else None
        self.norm = RMSNorm(build, f"{spec.name}.norm", ctx.text.rms_norm_eps)
        self._overlap = plan.overlap
        self._pool = (spec.pool, spec.layer)
        self._state = (spec.state, spec.layer)
        self._dtype = build.dtype
        self._finish = finish
        self._gives_latent = plan.index_keys == "latent"
        self._ops = build.ops

    @property
    def maps(self) -> list[Linear]:
        """What multiplies the layer's normed input."""
        return [self.wkv] if self.wgate is None else [self.wkv, self.wgate]

    def write_cache(
        self,
        projected: Projections,
        pool: CompressionStep,
        cache: CacheView,
        tables: Tables | None,
    ) -> torch.Tensor | None:
        """Write the entries that close in this step, and the rows that later groups need.

        `projected`: what `maps` make of the layer's normed input. `tables` rotate the new entries (None when none
        closes). Old rows are read before new ones may take their place. Returns the new entries before rotation,
        [P, D] in the activation dtype, where index keys are made of them.
        """
        rows_TE = self._rows(projected, pool)
        state = cache.pages.get(self._state)
        latent_PD: torch.Tensor | None = None
        if tables is not None:
            row_PD, pages = self._pooled(rows_TE, state, pool), cache.pages[self._pool]
            if self._gives_latent:
                row_PD = latent_PD = self.norm(row_PD)
            norm = None if self._gives_latent else self.norm
            self._finish(row_PD, tables, norm=norm, pages_NBD=pages, write_T=pool.write_P)
        if state is not None and pool.state_write_T is not None:
            self._ops.cache_write(state, rows_TE, pool.state_write_T)
        return latent_PD

    def _rows(self, projected: Projections, pool: CompressionStep) -> torch.Tensor:
        """Un-pooled rows: kv and gate side by side in fp32, kv alone in the activation dtype without gate."""
        kv_TE = projected[self.wkv]
        if self.wgate is None:
            return kv_TE
        ape_BE = None if self.ape is None else self.ape.tensor()
        return self._ops.compress_rows(kv_TE, projected[self.wgate], ape_BE, pool.phase_T)

    def _pooled(self, rows_TE: torch.Tensor, state: torch.Tensor | None, pool: CompressionStep) -> torch.Tensor:
        """New entries [P, D] in the activation dtype; a group of one row is that row."""
        if self.wgate is None:
            return rows_TE.index_select(0, pool.sources_PB[:, 0])
        past = None if state is None else state.flatten(0, 1)
        return self._ops.compress_pool(rows_TE, past, pool.sources_PB, overlap=self._overlap, out_dtype=self._dtype)
