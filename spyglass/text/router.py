"""Which experts a row goes to: by token id (hash layers) or score + bias; images by score + `bias_vl` (spec v4 7)."""

from __future__ import annotations

import torch
from torch import nn

from spyglass.config.model import LayerPlan
from spyglass.layers.embedding import PlainTensor
from spyglass.text.step import LayerContext, Step


class Gate(nn.Module):
    """The tensors `ffn.gate.*` of one layer; scores in full fp32.

    A hash layer never uses `bias`, which text checkpoints may therefore lack. `bias_vl` is for rows of every image
    kind, leading pads included, in every layer.
    """

    def __init__(self, plan: LayerPlan, ctx: LayerContext) -> None:
        super().__init__()
        text, build = ctx.text, ctx.build
        name = f"layers.{plan.index}.ffn.gate"
        self.weight = PlainTensor(build, name)
        self.bias = PlainTensor(build, f"{name}.bias")
        self.bias_vl = PlainTensor(build, f"{name}.bias_vl") if ctx.pictures else None
        self.tid2eid = PlainTensor(build, f"{name}.tid2eid", torch.int32) if plan.router == "hash" else None
        self._k = text.num_experts_per_tok
        self._scale = text.routed_scaling_factor
        self._choose = build.ops.router_topk

    def forward(self, x_TC: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Chosen experts int32 [T, K] and their weights fp32 [T, K], the scaling factor included."""
        forced = None if self.tid2eid is None else self.tid2eid.tensor()
        picture_bias = None if self.bias_vl is None or step.picture_T is None else self.bias_vl.tensor()
        return self._choose(
            x_TC,
            self.weight.tensor(),
            k=self._k,
            scale=self._scale,
            bias_E=None if forced is not None else self.bias.value,
            bias_picture_E=picture_bias,
            picture_T=step.picture_T,
            forced_TK=forced,
            forced_row_T=None if forced is None else step.ids_T,
            positions_T=step.batch.positions_T,
        )
