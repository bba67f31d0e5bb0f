"""Manifold hyper-connections: the residual is M streams, read, written and mixed by learned weights (spec v4 3).

x = Σ_m pre_m X_m goes into the sub-layer, X'_l = post_l z + Σ_m comb_ml X_m comes out; comb is made doubly stochastic.
"""

from __future__ import annotations

import torch
from torch import nn

from spyglass.layers.embedding import PlainTensor
from spyglass.text.step import TextBuild

Mix = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class HyperConnection(nn.Module):
    """The three checkpoint tensors `{name}_fn`, `{name}_base`, `{name}_scale` of one sub-layer, fp32."""

    def __init__(self, name: str, parts: TextBuild) -> None:
        super().__init__()
        text = parts.text
        self.fn, self.base, self.scale = (
            PlainTensor(parts.build, f"{name}_{which}") for which in ("fn", "base", "scale")
        )
        self._norm_eps = text.rms_norm_eps
        self._hc_eps = text.hc_eps
        self._rounds = text.hc_sinkhorn_iters
        self._ops = parts.build.ops

    def mix(self, streams_TMC: torch.Tensor) -> Mix:
        """pre_TM, post_TM, comb_TMM (source, target) of these streams, fp32."""
        out: Mix = self._ops.hyper_mix(
            streams_TMC,
            self.fn.value,
            self.scale.value,
            self.base.value,
            norm_eps=self._norm_eps,
            hc_eps=self._hc_eps,
            rounds=self._rounds,
        )
        return out

    def collapse(self, streams_TMC: torch.Tensor, pre_TM: torch.Tensor) -> torch.Tensor:
        """Input of the sub-layer, [T, C] in the streams' dtype."""
        out: torch.Tensor = self._ops.hyper_collapse(streams_TMC, pre_TM)
        return out

    def expand(
        self, z_TC: torch.Tensor, streams_TMC: torch.Tensor, post_TM: torch.Tensor, comb_TMM: torch.Tensor
    ) -> torch.Tensor:
        """The streams after the sub-layer gave `z_TC`."""
        out: torch.Tensor = self._ops.hyper_expand(z_TC, streams_TMC, post_TM, comb_TMM)
        return out


class HyperHead(nn.Module):
    """The last collapse, with weights of its own: p = σ(m · scale + base) + hc_eps (spec v4 3.3)."""

    def __init__(self, parts: TextBuild) -> None:
        super().__init__()
        text = parts.text
        self.fn, self.base, self.scale = (
            PlainTensor(parts.build, f"hc_head_{which}") for which in ("fn", "base", "scale")
        )
        self._norm_eps = text.rms_norm_eps
        self._hc_eps = text.hc_eps
        self._ops = parts.build.ops

    def forward(self, streams_TMC: torch.Tensor) -> torch.Tensor:
        """[T, C] in the streams' dtype, before the final norm."""
        weights = self.fn.value, self.scale.value, self.base.value
        p_TM = self._ops.hyper_head(streams_TMC, *weights, norm_eps=self._norm_eps, hc_eps=self._hc_eps)
        out: torch.Tensor = self._ops.hyper_collapse(streams_TMC, p_TM)
        return out
