"""The indexer: a small multi-head score chooses which compressed rows a query attends (spec v4 5.5, v41 3.3, 4.5).

score[t, p] = Σ_n relu(q_tn · k_p) · ω_tn. It only matters once more rows are visible than may be attended, but its keys
are always written: by a compressor of their own (V4), or from the latents of the layer's compressor (V4.1). Layers
above a candidate source choose among the blocks that its scores rank highest. A choice has no gradient, so no graph of
it is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spyglass.batch.types import CacheView, CompressionStep
from spyglass.config.model import LayerPlan
from spyglass.layers.linear import Linear
from spyglass.layers.merged import Projections
from spyglass.layers.norm import RMSNorm
from spyglass.text.compressor import Compressor, CompressorSpec
from spyglass.text.rounding import RowFinish
from spyglass.text.step import LayerContext, Step, Tables


class Indexer(nn.Module):
    """The tensors `attn.indexer.*` of one layer: queries always, what makes keys only where the layer owns the rows."""

    def __init__(self, plan: LayerPlan, ctx: LayerContext) -> None:
        super().__init__()
        text, build = ctx.text, ctx.build
        assert plan.index_keys_from is not None
        name = f"layers.{plan.index}.attn.indexer"
        self.finish = RowFinish(ctx, "index")
        self.wq_b = Linear(build, f"{name}.wq_b", rounding=ctx.rounding.linear)
        self.weights_proj = Linear(build, f"{name}.weights_proj")
        self.compressor: Compressor | None = None
        self.wk: Linear | None = None
        self.k_norm: RMSNorm | None = None
        source = None if plan.compressor is None else plan.compressor.index_keys
        if plan.compressor is not None and source == "compressor":
            spec = CompressorSpec(name=f"{name}.compressor", layer=plan.index, pool="index", state="index_state")
            self.compressor = Compressor(spec, plan.compressor, ctx, self.finish)
        elif source == "latent":
            self.wk = Linear(build, f"{name}.wk")
            self.k_norm = RMSNorm(build, f"{name}.k_norm", text.rms_norm_eps)
        heads, dim = text.index_n_heads, text.index_head_dim
        self._candidates = text.candidates
        self._plan = plan
        self._keys = ("index", plan.index_keys_from)
        self._table = f"pool{plan.ratio}"
        self._heads, self._dim, self._topk = heads, dim, text.index_topk
        self._weight_scale = dim**-0.5 * heads**-0.5
        self._stepwise = ctx.stepwise
        self._ops = build.ops

    @property
    def maps(self) -> list[Linear]:
        """What multiplies the layer's normed input."""
        return [self.weights_proj, *(() if self.compressor is None else self.compressor.maps)]

    @torch.no_grad()
    def write_cache(
        self,
        projected: Projections,
        latent_PD: torch.Tensor | None,
        pool: CompressionStep,
        cache: CacheView,
        tables: Tables | None,
        adapter_T: torch.Tensor | None,
    ) -> None:
        """Write the keys of the entries that close in this step; `latent_PD` are those entries before rotation."""
        if self.compressor is not None:
            self.compressor.write_cache(projected, pool, cache, tables)
        if self.wk is None or self.k_norm is None or latent_PD is None or tables is None:
            return
        # an entry closes with its last token, which is a row of this step and decides its adapter
        adapter_P = None if adapter_T is None else adapter_T.index_select(0, pool.sources_PB[:, -1])
        key_PI, pages = self.wk(latent_PD, adapter_P), cache.pages[self._keys]
        self.finish(key_PI, tables, norm=self.k_norm, pages_NBD=pages, write_T=pool.write_P)

    @torch.no_grad()
    def topk_indices(
        self, u_TQ: torch.Tensor, projected: Projections, step: Step, pool: CompressionStep, cache: CacheView
    ) -> torch.Tensor | None:
        """Entry numbers int32 [T, X], ascending, -1 = none; None = every visible entry is attended.

        `u_TQ` is the normed low-rank query, `projected` what `maps` make of the layer's normed input.
        """
        if pool.max_visible <= self._topk and not self._ranks_blocks(pool):
            return None
        adapter_T = step.batch.adapter_T
        q_TNI = self.wq_b(u_TQ, adapter_T).view(-1, self._heads, self._dim)
        q_TNI = self.finish(q_TNI, step.tables[self._plan.rope])
        # the scale is a second product, with a rounding of its own in bf16
        options: dict[str, Any] = {
            "weight_scale": self._weight_scale,
            "stepwise": self._stepwise,
            "max_visible": pool.max_visible,
            "key_format": self.finish.format,
        }
        scored = (
            q_TNI,
            projected[self.weights_proj],
            cache.pages[self._keys],
            cache.table_SP[self._table],
            step.batch.seq_T,
            pool.visible_T,
        )
        if self._ranks_blocks(pool):
            assert self._candidates is not None
            step.choices.blocks[self._plan.index] = self._ops.index_blocks(
                *scored,
                num_blocks=self._candidates.num_blocks,
                block_size=self._candidates.block_size,
                **options,
            )
        if pool.max_visible <= self._topk:
            return None
        limit, source = self._candidates, self._plan.candidates_from
        return self._ops.index_topk(
            *scored,
            k=self._topk,
            blocks_TY=None if source is None else step.choices.blocks.get(source),  # candidates to choose among
            block_size=0 if limit is None else limit.block_size,
            **options,
        )

    def _ranks_blocks(self, pool: CompressionStep) -> bool:
        """Whether this layer's scores decide candidates that leave something out."""
        plan = self._candidates
        return plan is not None and self._plan.makes_candidates and pool.max_visible > plan.num_blocks * plan.block_size
