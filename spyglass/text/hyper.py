"""Manifold hyper-connections: the residual is M streams, read, written and mixed by learned weights (spec v4 3).

x = Σ_m pre_m X_m goes into the sub-layer, X'_l = post_l z + Σ_m comb_ml X_m comes out; comb is made doubly stochastic.
What a sub-layer gave is written when the next one reads, in one op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spyglass.layers.embedding import PlainTensor
from spyglass.layers.norm import RMSNorm
from spyglass.ops.declare import Ops
from spyglass.quant.formats import FakeQuant
from spyglass.text.step import LayerContext


@dataclass(frozen=True, slots=True)
class Residual:
    """The streams [T, M, C] between two sub-layers.

    `post_TM` and `comb_TMM` say how the sub-layer at work will be written into them. `z_TC` is what it gave, if that
    is not written yet; with `shared_TC` its sum with that.
    """

    streams_TMC: torch.Tensor
    post_TM: torch.Tensor | None = None
    comb_TMM: torch.Tensor | None = None
    z_TC: torch.Tensor | None = None
    shared_TC: torch.Tensor | None = None

    def given(self, z_TC: torch.Tensor, shared_TC: torch.Tensor | None = None) -> Residual:
        """The sub-layer gave `z_TC`."""
        return Residual(self.streams_TMC, self.post_TM, self.comb_TMM, z_TC, shared_TC)

    def written(self, ops: Ops) -> torch.Tensor:
        """The streams with everything written."""
        z_TC = self.z_TC
        if z_TC is None:
            return self.streams_TMC
        if self.shared_TC is not None:
            z_TC = ops.add_shared(z_TC, self.shared_TC)
        assert self.post_TM is not None and self.comb_TMM is not None
        return ops.hyper_expand(z_TC, self.streams_TMC, self.post_TM, self.comb_TMM)


class HyperConnection(nn.Module):
    """The three checkpoint tensors `{name}_fn`, `{name}_base`, `{name}_scale` of one sub-layer, fp32."""

    def __init__(self, name: str, ctx: LayerContext) -> None:
        super().__init__()
        text = ctx.text
        self.fn, self.base, self.scale = (
            PlainTensor(ctx.build, f"{name}_{which}") for which in ("fn", "base", "scale")
        )
        self._options: dict[str, Any] = {
            "norm_eps": text.rms_norm_eps,
            "hc_eps": text.hc_eps,
            "rounds": text.hc_sinkhorn_iters,
        }
        self._ops = ctx.build.ops

    def read(
        self, residual: Residual, norm: RMSNorm, pre_TM: torch.Tensor | None = None, quant: FakeQuant | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, Residual]:
        """Input of the sub-layer [T, C], what `quant` makes of it, the pre found [T, M], and the residual meanwhile.

        Streams are read by `pre_TM`, or else by the pre found.
        """
        assert norm.weight_D is not None
        weights = self.fn.tensor(), self.scale.tensor(), self.base.tensor(), norm.weight_D
        options: dict[str, Any] = {**self._options, "eps": norm.eps, "pre_TM": pre_TM, "quant": quant}
        streams_TMC, post, comb = residual.streams_TMC, residual.post_TM, residual.comb_TMM
        if residual.z_TC is None:
            x_TC, pre, post, comb, *rounded = self._ops.hyper_read(streams_TMC, *weights, **options)
        else:
            assert post is not None and comb is not None
            streams_TMC, x_TC, pre, post, comb, *rounded = self._ops.hyper_write_read(
                residual.z_TC, residual.shared_TC, streams_TMC, post, comb, *weights, **options
            )
        return x_TC, rounded[0] if rounded else None, pre, Residual(streams_TMC, post, comb)


class HyperHead(nn.Module):
    """The last collapse, with weights of its own: p = σ(m · scale + base) + hc_eps (spec v4 3.3)."""

    def __init__(self, ctx: LayerContext) -> None:
        super().__init__()
        text = ctx.text
        self.fn, self.base, self.scale = (
            PlainTensor(ctx.build, f"hc_head_{which}") for which in ("fn", "base", "scale")
        )
        self._norm_eps = text.rms_norm_eps
        self._hc_eps = text.hc_eps
        self._ops = ctx.build.ops

    def forward(self, streams_TMC: torch.Tensor) -> torch.Tensor:
        """[T, C] in the streams' dtype, before the final norm."""
        weights = self.fn.tensor(), self.scale.tensor(), self.base.tensor()
        p_TM = self._ops.hyper_head(streams_TMC, *weights, norm_eps=self._norm_eps, hc_eps=self._hc_eps)
        return self._ops.hyper_collapse(streams_TMC, p_TM)
