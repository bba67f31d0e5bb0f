"""The V4 backbone: attention, then experts, each between a read and a write of the residual streams (spec v4 10)."""

from __future__ import annotations

import torch
from torch import nn

from spyglass.batch.types import Batch, CacheView
from spyglass.config.model import LayerPlan
from spyglass.layers.build import RunPart, run_part
from spyglass.layers.norm import RMSNorm
from spyglass.text.attention import Attention
from spyglass.text.experts import FeedForward
from spyglass.text.hyper import HyperConnection, HyperHead, Residual
from spyglass.text.step import LayerContext, Step, make_ropes, make_step


class V4Layer(nn.Module):
    """One decoder layer; pre, post and comb all belong to the sub-layer that computes them."""

    def __init__(self, plan: LayerPlan, ctx: LayerContext) -> None:
        super().__init__()
        name, text = f"layers.{plan.index}", ctx.text
        self.hc_attn = HyperConnection(f"{name}.hc_attn", ctx)
        self.attn_norm = RMSNorm(ctx.build, f"{name}.attn_norm", text.rms_norm_eps)
        self.attn = Attention(plan, ctx)
        self.hc_ffn = HyperConnection(f"{name}.hc_ffn", ctx)
        self.ffn_norm = RMSNorm(ctx.build, f"{name}.ffn_norm", text.rms_norm_eps)
        self.ffn = FeedForward(plan, ctx)
        self._ops = ctx.build.ops

    def forward(self, streams_TMC: torch.Tensor, step: Step, cache: CacheView) -> torch.Tensor:
        """Streams in, streams out; the cache is written in place."""
        return self.advance(Residual(streams_TMC), step, cache).written(self._ops)

    def advance(self, residual: Residual, step: Step, cache: CacheView) -> Residual:
        """The same, with what the last sub-layers gave not written yet."""
        x_TC, rounded, _, residual = self.hc_attn.read(residual, self.attn_norm, quant=self.attn.quant)
        residual = residual.given(self.attn(x_TC, step, cache, rounded))
        x_TC, rounded, _, residual = self.hc_ffn.read(residual, self.ffn_norm, quant=self.ffn.quant)
        return residual.given(*self.ffn.routed_and_shared(x_TC, step, rounded))


class V4Backbone(nn.Module):
    """All layers, the last collapse and the final norm."""

    def __init__(self, ctx: LayerContext) -> None:
        super().__init__()
        text = ctx.text
        self.layers = nn.ModuleList(V4Layer(plan, ctx) for plan in text.layers)
        self.hc_head = HyperHead(ctx)
        self.norm = RMSNorm(ctx.build, "norm", text.rms_norm_eps)
        self.run_layer: RunPart = run_part
        self._plans = text.layers
        self.ropes = make_ropes(text.layers, ctx.build.device)
        self._ops = ctx.build.ops

    def forward(
        self, streams_TMC: torch.Tensor, batch: Batch, cache: CacheView
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Hidden rows [T, C], normed, and the output streams [T, M, C] of the layers in `batch.capture`."""
        captured: dict[int, torch.Tensor] = {}
        step = make_step(batch, cache, self.ropes, self._plans)
        residual = Residual(streams_TMC)
        for index, layer in enumerate(self.layers):
            if batch.between_layers is not None:
                batch.between_layers()
            assert isinstance(layer, V4Layer)
            if self.run_layer is run_part:
                residual = layer.advance(residual, step, cache)
            else:
                residual = Residual(self.run_layer(layer, residual.written(self._ops), step, cache))
            if index in batch.capture:
                residual = Residual(residual.written(self._ops))
                captured[index] = residual.streams_TMC
        return self.norm(self.hc_head(residual.written(self._ops))), captured
