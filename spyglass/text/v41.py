"""The V4.1 backbone: hyper-connections shifted by one sub-layer, and memories before some layers (spec v41 4.3).

What a sub-layer reads is mixed with the weights that the sub-layer before it computed; how it writes, with its own. The
first reads stream 0, which all streams equal there; the last weights read the streams for the final norm.
"""

from __future__ import annotations

import torch
from torch import nn

from spyglass.batch.types import Batch, CacheView
from spyglass.config.model import LayerPlan
from spyglass.layers.build import RunPart, run_part
from spyglass.layers.norm import RMSNorm
from spyglass.text.attention import Attention
from spyglass.text.engram import Engram
from spyglass.text.experts import FeedForward
from spyglass.text.hyper import HyperConnection, Residual
from spyglass.text.step import LayerContext, Step, make_ropes, make_step


class V41Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, plan: LayerPlan, ctx: LayerContext) -> None:
        super().__init__()
        name, text = f"layers.{plan.index}", ctx.text
        self.engram = Engram(plan, ctx) if plan.engram else None
        self.hc_attn = HyperConnection(f"{name}.hc_attn", ctx)
        self.attn_norm = RMSNorm(ctx.build, f"{name}.attn_norm", text.rms_norm_eps)
        self.attn = Attention(plan, ctx)
        self.hc_ffn = HyperConnection(f"{name}.hc_ffn", ctx)
        self.ffn_norm = RMSNorm(ctx.build, f"{name}.ffn_norm", text.rms_norm_eps)
        self.ffn = FeedForward(plan, ctx)
        self._ops = ctx.build.ops

    def recall(self, streams_TMC: torch.Tensor, step: Step) -> torch.Tensor:
        """The streams as this layer takes them in: with its memory added, if it has one."""
        return streams_TMC if self.engram is None else self.engram(streams_TMC, step)

    def forward(
        self, streams_TMC: torch.Tensor, pre_TM: torch.Tensor, step: Step, cache: CacheView
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams and the weights that read them, in and out; the cache is written in place."""
        residual, pre_TM = self.advance(Residual(streams_TMC), pre_TM, step, cache)
        return residual.written(self._ops), pre_TM

    def advance(
        self, residual: Residual, pre_TM: torch.Tensor, step: Step, cache: CacheView
    ) -> tuple[Residual, torch.Tensor]:
        """The same, with what the last sub-layers gave not written yet."""
        x_TC, rounded, pre_TM, residual = self.hc_attn.read(residual, self.attn_norm, pre_TM, self.attn.quant)
        residual = residual.given(self.attn(x_TC, step, cache, rounded))
        x_TC, rounded, pre_TM, residual = self.hc_ffn.read(residual, self.ffn_norm, pre_TM, self.ffn.quant)
        return residual.given(*self.ffn.routed_and_shared(x_TC, step, rounded)), pre_TM


class V41Backbone(nn.Module):
    """All layers, the last collapse and the final norm."""

    def __init__(self, ctx: LayerContext) -> None:
        super().__init__()
        text = ctx.text
        self.layers = nn.ModuleList(V41Layer(plan, ctx) for plan in text.layers)
        self.norm = RMSNorm(ctx.build, "norm", text.rms_norm_eps)
        self.run_layer: RunPart = run_part
        self._plans = text.layers
        self.ropes = make_ropes(text.layers, ctx.build.device)
        self._ops = ctx.build.ops

    def forward(
        self, streams_TMC: torch.Tensor, batch: Batch, cache: CacheView
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Hidden rows [T, C], normed, and the streams [T, M, C] that enter the layers in `batch.capture`."""
        step = make_step(batch, cache, self.ropes, self._plans)
        captured: dict[int, torch.Tensor] = {}
        pre_TM = torch.zeros(streams_TMC.shape[:2], dtype=torch.float32, device=streams_TMC.device)
        pre_TM[:, 0].fill_(1.0)  # an assignment would copy from the host
        residual = Residual(streams_TMC)
        for index, layer in enumerate(self.layers):
            if batch.between_layers is not None:
                batch.between_layers()
            assert isinstance(layer, V41Layer)
            if layer.engram is not None or index in batch.capture:
                residual = Residual(layer.recall(residual.written(self._ops), step))
            if index in batch.capture:
                captured[index] = residual.streams_TMC
            if self.run_layer is run_part:
                residual, pre_TM = layer.advance(residual, pre_TM, step, cache)
            else:
                streams_TMC, pre_TM = self.run_layer(layer, residual.written(self._ops), pre_TM, step, cache)
                residual = Residual(streams_TMC)
        return self.norm(self._ops.hyper_collapse(residual.written(self._ops), pre_TM)), captured
