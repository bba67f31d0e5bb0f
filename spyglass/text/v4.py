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
from spyglass.text.hyper import HyperConnection, HyperHead
from spyglass.text.step import Step, TextBuild, make_ropes, make_step


class V4Layer(nn.Module):
    """One decoder layer; pre, post and comb all belong to the sub-layer that computes them."""

    def __init__(self, plan: LayerPlan, parts: TextBuild) -> None:
        super().__init__()
        name, text = f"layers.{plan.index}", parts.text
        self.hc_attn = HyperConnection(f"{name}.hc_attn", parts)
        self.attn_norm = RMSNorm(parts.build, f"{name}.attn_norm", text.rms_norm_eps)
        self.attn = Attention(plan, parts)
        self.hc_ffn = HyperConnection(f"{name}.hc_ffn", parts)
        self.ffn_norm = RMSNorm(parts.build, f"{name}.ffn_norm", text.rms_norm_eps)
        self.ffn = FeedForward(plan, parts)

    def forward(self, streams_TMC: torch.Tensor, step: Step, cache: CacheView) -> torch.Tensor:
        """Streams in, streams out; the cache is written in place."""
        pre, post, comb = self.hc_attn.mix(streams_TMC)
        x_TC = self.attn_norm(self.hc_attn.collapse(streams_TMC, pre))
        self.attn.remember(x_TC, step, cache)
        streams_TMC = self.hc_attn.expand(self.attn.attend(x_TC, step, cache), streams_TMC, post, comb)
        pre, post, comb = self.hc_ffn.mix(streams_TMC)
        x_TC = self.ffn_norm(self.hc_ffn.collapse(streams_TMC, pre))
        return self.hc_ffn.expand(self.ffn(x_TC, step), streams_TMC, post, comb)


class V4Backbone(nn.Module):
    """All layers, the last collapse and the final norm."""

    def __init__(self, parts: TextBuild) -> None:
        super().__init__()
        text = parts.text
        self.layers = nn.ModuleList(V4Layer(plan, parts) for plan in text.layers)
        self.hc_head = HyperHead(parts)
        self.norm = RMSNorm(parts.build, "norm", text.rms_norm_eps)
        self.run_layer: RunPart = run_part
        self._plans = text.layers
        self.ropes = make_ropes(text.layers, parts.build.device)

    def forward(
        self, streams_TMC: torch.Tensor, batch: Batch, cache: CacheView
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Hidden rows [T, C], normed, and the output streams [T, M, C] of the layers in `batch.capture`."""
        captured: dict[int, torch.Tensor] = {}
        step = make_step(batch, cache, self.ropes, self._plans)
        for index, layer in enumerate(self.layers):
            streams_TMC = self.run_layer(layer, streams_TMC, step, cache)
            if index in batch.capture:
                captured[index] = streams_TMC
        return self.norm(self.hc_head(streams_TMC)), captured
