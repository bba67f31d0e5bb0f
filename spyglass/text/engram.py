"""The gate through which an n-gram memory enters the residual streams (spec v41 5.4).

    d_m = Σ_c h_mc q_mc k_mc key_mc · rsqrt(mean h_m²) · rsqrt(mean key_m²) · C^-1/2
    g_m = σ(sign(d_m) sqrt(max(|d_m|, 1e-6))),   0 on pictures
    h_m <- h_m + g_m · value

Rows come with the batch: which ones depends on token ids alone, so a driver fetches them ahead.
"""

from __future__ import annotations

import torch
from torch import nn

from spyglass.config.model import LayerPlan
from spyglass.layers.embedding import PlainTensor
from spyglass.layers.linear import Linear
from spyglass.text.step import Step, TextBuild

_LEAST = 1e-6


class Engram(nn.Module):
    """The tensors `engram.{wkv, q_weight, k_weight}` of one layer; its table is not a part of the model."""

    def __init__(self, plan: LayerPlan, parts: TextBuild) -> None:
        super().__init__()
        text, build = parts.text, parts.build
        name = f"layers.{plan.index}.engram"
        self.wkv = Linear(build, f"{name}.wkv", rounding=parts.rounding.linear)
        self.q_weight = PlainTensor(build, f"{name}.q_weight")
        self.k_weight = PlainTensor(build, f"{name}.k_weight")
        self._layer, self._streams, self._hidden = plan.index, text.hc_mult, text.hidden_size
        self._eps = text.rms_norm_eps

    def forward(self, streams_TMC: torch.Tensor, step: Step) -> torch.Tensor:
        """The streams with the memory added, in their dtype; fp32 inside, statistics per stream."""
        both = self.wkv(step.batch.engram_rows[self._layer], step.batch.slot_T)
        key_TMC, value_TC = both.float().split([self._streams * self._hidden, self._hidden], dim=-1)
        key_TMC = key_TMC.unflatten(-1, (self._streams, self._hidden))
        h_TMC = streams_TMC.float()
        dot_TM = (h_TMC * (self.q_weight.tensor() * self.k_weight.tensor()) * key_TMC).sum(dim=-1)
        dot_TM = dot_TM * self._inverse_size(h_TMC) * self._inverse_size(key_TMC) * self._hidden**-0.5
        gate_TM = torch.sigmoid(torch.copysign(dot_TM.abs().clamp(min=_LEAST).sqrt(), dot_TM))
        if step.picture_T is not None:
            gate_TM = gate_TM.masked_fill(step.picture_T[:, None], 0.0)
        return (h_TMC + gate_TM[:, :, None] * value_TC[:, None]).to(streams_TMC.dtype)

    def _inverse_size(self, x_TMC: torch.Tensor) -> torch.Tensor:
        return torch.rsqrt(x_TMC.square().mean(dim=-1) + self._eps)
