"""The gate through which an n-gram memory enters the residual streams (spec v41 5.4).

    d_m = Σ_c h_mc q_mc k_mc key_mc · rsqrt(mean h_m²) · rsqrt(mean key_m²) · C^-1/2
    g_m = σ(sign(d_m) sqrt(max(|d_m|, 1e-6))),   0 on images
    h_m <- h_m + g_m · value

Rows come with the batch: which ones depends on token ids alone, so a driver fetches them ahead.
"""

from __future__ import annotations

import torch
from torch import nn

from spyglass.config.model import LayerPlan
from spyglass.layers.embedding import PlainTensor
from spyglass.layers.linear import Linear
from spyglass.text.step import LayerContext, Step


class Engram(nn.Module):
    """The tensors `engram.{wkv, q_weight, k_weight}` of one layer; its table is not a part of the model."""

    def __init__(self, plan: LayerPlan, ctx: LayerContext) -> None:
        super().__init__()
        text, build = ctx.text, ctx.build
        name = f"layers.{plan.index}.engram"
        self.wkv = Linear(build, f"{name}.wkv", rounding=ctx.rounding.linear)
        self.q_weight = PlainTensor(build, f"{name}.q_weight")
        self.k_weight = PlainTensor(build, f"{name}.k_weight")
        self._layer = plan.index
        self._gate = build.ops.engram_gate
        self._eps = text.rms_norm_eps

    def forward(self, streams_TMC: torch.Tensor, step: Step) -> torch.Tensor:
        """The streams with the memory added, in their dtype."""
        return self._gate(
            streams_TMC,
            self.wkv(step.batch.engram_rows[self._layer], step.batch.adapter_T),
            self.q_weight.tensor(),
            self.k_weight.tensor(),
            eps=self._eps,
            is_image_T=step.is_image_T,
        )
