"""Latent attention: one stored row per token is key and value of all heads (spec v4 4, 5; v41 3.1, 4.4).

A query sees the raw rows of its window and compressed rows of everything before, in one softmax with a sink per head.
Compressed rows, and the choice among them, may be those of a layer below.
"""

from __future__ import annotations

import torch
from torch import nn

from spyglass.batch.types import CacheView, CompressionStep
from spyglass.config.model import LayerPlan
from spyglass.layers.embedding import PlainTensor
from spyglass.layers.linear import GroupedLinear, Linear, common_quant
from spyglass.layers.merged import MergedLinear, Projections
from spyglass.layers.norm import RMSNorm
from spyglass.ops.sparse_attention.reference import Turn
from spyglass.quant.formats import FakeQuant
from spyglass.text.compressor import Compressor, CompressorSpec
from spyglass.text.indexer import Indexer
from spyglass.text.rounding import RowFinish
from spyglass.text.step import LayerContext, Step


class Attention(nn.Module):
    """The tensors `attn.*` of one layer; of several processes each has some of the heads, and all latents."""

    def __init__(self, plan: LayerPlan, ctx: LayerContext) -> None:
        super().__init__()
        text, build = ctx.text, ctx.build
        name = f"layers.{plan.index}.attn"
        rounding = ctx.rounding.linear
        self.attn_sink = PlainTensor(build, f"{name}.attn_sink")
        self.wq_a = Linear(build, f"{name}.wq_a", rounding=rounding)
        self.q_norm = RMSNorm(build, f"{name}.q_norm", text.rms_norm_eps)
        self.wq_b = Linear(build, f"{name}.wq_b", rounding=rounding)
        self.wkv = Linear(build, f"{name}.wkv", rounding=rounding)
        self.kv_norm = RMSNorm(build, f"{name}.kv_norm", text.rms_norm_eps)
        self.wo_a = GroupedLinear(build, f"{name}.wo_a")
        self.wo_b = Linear(build, f"{name}.wo_b", rounding=rounding)
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if plan.compressor is not None:
            spec = CompressorSpec(name=f"{name}.compressor", layer=plan.index, pool="pool", state="state")
            self.compressor = Compressor(spec, plan.compressor, ctx, RowFinish(ctx, "pool"))
        if plan.index_from == plan.index:
            self.indexer = Indexer(plan, ctx)
        # index keys that are made of the layer's compressed rows come behind these
        self._index_branch = 0 if self.indexer is None or self.indexer.compressor is None else 1
        more = [*(self.compressor.maps if self.compressor else ()), *(self.indexer.maps if self.indexer else ())]
        self._inputs = MergedLinear([self.wkv, self.wq_a, *more])
        self._plan = plan
        self._window = ("window", plan.index)
        self._pool = None if plan.kv_from is None else ("pool", plan.kv_from)
        self._heads, self._dim = build.param(f"{name}.attn_sink").shape[0], text.head_dim
        self._group = build.group
        self._scale = text.head_dim**-0.5
        self._q_eps = text.rms_norm_eps if text.q_head_norm else None
        self._stepwise = ctx.stepwise
        self._finish = RowFinish(ctx, "window")
        self._pool_format = RowFinish(ctx, "pool").format
        self._ops, self._side = build.ops, build.side

    @property
    def quant(self) -> FakeQuant | None:
        """The rounding of the layer's normed input that should come with it."""
        return common_quant(self.wq_a, self.wkv)

    def forward(
        self, x_TC: torch.Tensor, step: Step, cache: CacheView, rounded_TC: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What these rows read from memory, [T, C], once their own rows are in it; `x_TC` is the layer's normed input.

        `rounded_TC`: what `quant` makes of it.
        """
        adapter_T = step.batch.adapter_T
        projected = self._inputs(x_TC, adapter_T, rounded_TC)
        self._write_cache(projected, step, cache)
        quant = self.wq_b.quant if self.indexer is None else common_quant(self.wq_b, self.indexer.wq_b)
        u_TQ = self.q_norm(projected[self.wq_a], quant)
        pool = None if self._pool is None else cache.compression[self._plan.ratio]
        if pool is not None and pool.max_visible == 0:
            pool = None
        topk_indices_TX = self._topk_indices(u_TQ, projected, step, pool, cache)
        q_THD = self.wq_b(u_TQ, adapter_T, None if quant is None else u_TQ).view(-1, self._heads, self._dim)
        self._side.join()
        out_THD = self._read(q_THD, topk_indices_TX, step, pool, cache)
        out_TGO = self.wo_a(out_THD.view(len(out_THD), self.wo_a.groups, -1), adapter_T)
        return self._group.sum(self.wo_b(out_TGO.flatten(1), adapter_T)).to(x_TC.dtype)

    def _write_cache(self, projected: Projections, step: Step, cache: CacheView) -> None:
        """Write window rows, compressed rows and index keys of these rows, beside the queries."""
        plan, pages = self._plan, cache.pages[self._window]
        tables, adapter_T = step.tables[plan.rope], step.batch.adapter_T
        kv_TD = projected[self.wkv]
        with self._side.branch(0):
            self._finish(kv_TD, tables, norm=self.kv_norm, pages_NBD=pages, write_T=cache.window_write_T)
            if self.compressor is None:
                return
            pool, entry_tables = cache.compression[plan.ratio], step.entry_tables.get((plan.ratio, plan.rope))
            latent_PD = self.compressor.write_cache(projected, pool, cache, entry_tables)
        if self.indexer is not None:
            with self._side.branch(self._index_branch):
                self.indexer.write_cache(projected, latent_PD, pool, cache, entry_tables, adapter_T)

    def _read(
        self,
        q_THD: torch.Tensor,
        topk_indices_TX: torch.Tensor | None,
        step: Step,
        pool: CompressionStep | None,
        cache: CacheView,
    ) -> torch.Tensor:
        batch, (cos_TR, sin_TR) = step.batch, step.tables[self._plan.rope]
        width = 0 if pool is None else pool.max_visible
        return self._ops.sparse_attention(
            q_THD,
            cache.pages[self._window],
            cache.table_SP["window"],
            batch.seq_T,
            batch.window_lo_T,
            batch.window_hi_T,
            self.attn_sink.tensor(),
            scale=self._scale,
            window_width=batch.window_width,
            pool_NBD=None if pool is None or self._pool is None else cache.pages[self._pool],
            pool_table_SP=None if pool is None else cache.table_SP[f"pool{pool.ratio}"],
            visible_T=None if pool is None else pool.visible_T,
            topk_indices_TX=topk_indices_TX,
            pool_width=width if topk_indices_TX is None else topk_indices_TX.shape[1],
            turn=Turn(cos_TR=cos_TR, sin_TR=sin_TR, eps=self._q_eps, stepwise=self._stepwise),
            window_format=self._finish.format,
            pool_format=self._pool_format,
        )

    def _topk_indices(
        self, u_TQ: torch.Tensor, projected: Projections, step: Step, pool: CompressionStep | None, cache: CacheView
    ) -> torch.Tensor | None:
        source = self._plan.index_from
        if source is None or pool is None:
            return None
        topk_indices = step.choices.topk_indices
        if self.indexer is not None:
            with self._side.branch(self._index_branch):
                topk_indices[source] = self.indexer.topk_indices(u_TQ, projected, step, pool, cache)
        return topk_indices[source]
