"""The indexer: a small multi-head score chooses which compressed rows a query attends (spec v4 5.5).

score[t, p] = Σ_n relu(q_tn · k_p) · ω_tn. It only matters once more rows are visible than may be attended, but its keys
are always written.
"""

from __future__ import annotations

import torch
from torch import nn

from spyglass.batch.types import CacheView, PoolStep
from spyglass.config.model import LayerPlan
from spyglass.layers.linear import Linear, LinearSpec
from spyglass.text.compressor import Compressor, CompressorSpec
from spyglass.text.rounding import IndexRounding
from spyglass.text.step import Step, TextBuild


class Indexer(nn.Module):
    """The tensors `attn.indexer.*` of one layer."""

    def __init__(self, plan: LayerPlan, parts: TextBuild) -> None:
        super().__init__()
        text, build = parts.text, parts.build
        assert plan.compressor is not None and plan.index_keys_from is not None
        name = f"layers.{plan.index}.attn.indexer"
        heads, dim = text.index_n_heads, text.index_head_dim
        self._rounded = IndexRounding(parts)
        self.wq_b = Linear(
            LinearSpec(
                name=f"{name}.wq_b",
                in_features=text.q_lora_rank,
                out_features=heads * dim,
                rounding=parts.rounding.linear,
            ),
            build,
        )
        self.weights_proj = Linear(
            LinearSpec(name=f"{name}.weights_proj", in_features=text.hidden_size, out_features=heads), build
        )
        spec = CompressorSpec(name=f"{name}.compressor", layer=plan.index, dim=dim, pool="index", state="index_state")
        self.compressor = Compressor(spec, plan.compressor, parts, self._rounded)
        self._plan = plan
        self._keys = ("index", plan.index_keys_from)
        self._table = f"pool{plan.ratio}"
        self._heads, self._dim, self._topk = heads, dim, text.index_topk
        self._weight_scale = dim**-0.5 * heads**-0.5
        self._stepwise = parts.stepwise
        self._ops = build.ops

    def picks(
        self, u_TQ: torch.Tensor, x_TC: torch.Tensor, step: Step, pool: PoolStep, cache: CacheView
    ) -> torch.Tensor | None:
        """Entry numbers int32 [T, X], ascending, -1 = none; None = every visible entry is attended.

        `u_TQ` is the normed low-rank query, `x_TC` the layer's normed input.
        """
        if pool.max_visible <= self._topk:
            return None
        slot_T = step.batch.slot_T
        q_TNI = self.wq_b(u_TQ, slot_T).view(-1, self._heads, self._dim)
        q_TNI = self._rounded(self._ops.rope_partial(q_TNI, *step.tables[self._plan.rope]))
        # two roundings in bf16: the projection's, then the product's
        weights_TN = self.weights_proj(x_TC, slot_T) * self._weight_scale
        picks_TX: torch.Tensor = self._ops.index_topk(
            q_TNI,
            weights_TN,
            cache.pages[self._keys],
            cache.table_SP[self._table],
            step.batch.seq_T,
            pool.visible_T,
            k=self._topk,
            max_visible=pool.max_visible,
            stepwise=self._stepwise,
        )
        return picks_TX
