"""Which experts a row goes to: by token id (hash layers) or score + bias; pictures by score + `bias_vl` (spec v4 7)."""

from __future__ import annotations

import torch
from torch import nn

from spyglass.config.model import LayerPlan
from spyglass.layers.embedding import PlainSpec, PlainTensor
from spyglass.text.step import Step, TextBuild


class Gate(nn.Module):
    """The tensors `ffn.gate.*` of one layer; scores in full fp32.

    A hash layer never uses `bias`, which text checkpoints may therefore lack. `bias_vl` is for rows of every picture
    kind, leading pads included, in every layer.
    """

    def __init__(self, plan: LayerPlan, parts: TextBuild) -> None:
        super().__init__()
        text, build = parts.text, parts.build
        name, experts = f"layers.{plan.index}.ffn.gate", text.n_routed_experts
        hashed = plan.router == "hash"
        self.weight = PlainTensor(PlainSpec(name=name, shape=(experts, text.hidden_size), kind="matrix"), build)
        self.bias = PlainTensor(PlainSpec(name=f"{name}.bias", shape=(experts,), optional=hashed), build)
        self.bias_vl: PlainTensor | None = None
        if parts.pictures:
            self.bias_vl = PlainTensor(PlainSpec(name=f"{name}.bias_vl", shape=(experts,)), build)
        self.tid2eid: PlainTensor | None = None
        if hashed:
            table = PlainSpec(
                name=f"{name}.tid2eid",
                shape=(text.vocab_size, text.num_experts_per_tok),
                dtype=torch.int32,
                kind="index",
                below=experts,
            )
            self.tid2eid = PlainTensor(table, build)
        self._k = text.num_experts_per_tok
        self._scale = text.routed_scaling_factor
        self._choose = build.ops.router_topk

    def forward(self, x_TC: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Chosen experts int32 [T, K] and their weights fp32 [T, K], the scaling factor included."""
        forced = None if self.tid2eid is None else self.tid2eid.tensor()
        picture_bias = None if self.bias_vl is None or step.picture_T is None else self.bias_vl.tensor()
        out: tuple[torch.Tensor, torch.Tensor] = self._choose(
            x_TC,
            self.weight.value,
            k=self._k,
            scale=self._scale,
            bias_E=None if forced is not None else self.bias.value,
            bias_picture_E=picture_bias,
            picture_T=step.picture_T,
            forced_TK=forced,
            forced_row_T=None if forced is None else step.ids_T,
            positions_T=step.batch.positions_T,
        )
        return out
