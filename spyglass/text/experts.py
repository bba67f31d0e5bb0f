"""Mixture of experts: the chosen routed ones and one shared expert, all clamped SwiGLUs (spec v4 7.4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spyglass.config.model import LayerPlan
from spyglass.layers.embedding import PlainTensor
from spyglass.layers.hosted import routed_experts
from spyglass.layers.linear import Linear, common_quant
from spyglass.layers.merged import MergedLinear
from spyglass.quant.formats import FakeQuant
from spyglass.text.step import LayerContext, Step


class Gate(nn.Module):
    """Which experts a row goes to: by token id (hash layers) or score + bias; images by score + `bias_vl` (spec v4 7).

    The tensors `ffn.gate.*` of one layer; scores in full fp32.

    A hash layer never uses `bias`, which text checkpoints may therefore lack. `bias_vl` is for rows of every image
    kind, leading pads included, in every layer.
    """

    def __init__(self, plan: LayerPlan, ctx: LayerContext) -> None:
        super().__init__()
        text, build = ctx.text, ctx.build
        name = f"layers.{plan.index}.ffn.gate"
        self.weight = PlainTensor(build, name)
        self.bias = PlainTensor(build, f"{name}.bias")
        self.bias_vl = PlainTensor(build, f"{name}.bias_vl") if ctx.images else None
        self.tid2eid = PlainTensor(build, f"{name}.tid2eid", torch.int32) if plan.router == "hash" else None
        self._k = text.num_experts_per_tok
        self._scale = text.routed_scaling_factor
        self._choose = build.ops.router_topk

    def forward(self, x_TC: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Chosen experts int32 [T, K] and their weights fp32 [T, K], the scaling factor included."""
        forced = None if self.tid2eid is None else self.tid2eid.tensor()
        image_bias = None if self.bias_vl is None or step.is_image_T is None else self.bias_vl.tensor()
        return self._choose(
            x_TC,
            self.weight.tensor(),
            k=self._k,
            scale=self._scale,
            bias_E=None if forced is not None else self.bias.value,
            bias_image_E=image_bias,
            is_image_T=step.is_image_T,
            forced_TK=forced,
            forced_row_T=None if forced is None else step.ids_T,
            positions_T=step.batch.positions_T,
        )


class SharedExpert(nn.Module):
    """w2( silu(min(w1 x, limit)) · clamp(w3 x, ±limit) ): weight 1, not scaled, clamped like the routed ones."""

    def __init__(self, name: str, ctx: LayerContext) -> None:
        super().__init__()
        text, build = ctx.text, ctx.build
        self.w1, self.w3, self.w2 = (
            Linear(build, f"{name}.{which}", rounding=ctx.rounding.linear) for which in ("w1", "w3", "w2")
        )
        self._inputs = MergedLinear([self.w1, self.w3])
        self._limit = text.swiglu_limit
        self._swiglu = build.ops.swiglu

    def forward(
        self, x_TC: torch.Tensor, adapter_T: torch.Tensor | None, rounded_TC: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, C] to the same shape and dtype; the activation in fp32, rounded once before w2.

        A summand of that in fp32 where this process has a part of the inner channels.
        """
        projected = self._inputs(x_TC, adapter_T, rounded_TC)
        z_TF = self._swiglu(projected[self.w1], projected[self.w3], limit=self._limit, quant=self.w2.quant)
        out: torch.Tensor = self.w2(z_TF, adapter_T, None if self.w2.quant is None else z_TF)
        return out


class FeedForward(nn.Module):
    """The tensors `ffn.*` of one layer."""

    def __init__(self, plan: LayerPlan, ctx: LayerContext) -> None:
        super().__init__()
        name = f"layers.{plan.index}.ffn"
        self.gate = Gate(plan, ctx)
        self._host, self._index, text = ctx.build.host, plan.index, ctx.text
        how: dict[str, Any] = {"limit": text.swiglu_limit, "rounding": ctx.rounding.linear}
        self.experts = routed_experts(
            ctx.build, f"{name}.experts", layer=plan.index, chosen=text.num_experts_per_tok, **how
        )
        self.shared_experts = SharedExpert(f"{name}.shared_experts", ctx)
        self._add_shared = ctx.build.ops.add_shared
        self._group, self._side = ctx.build.group, ctx.build.side

    def forward(self, x_TC: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, C] to the same shape and dtype; routed outputs and the shared one are summed in fp32, rounded once."""
        z_TC, shared_TC = self.routed_and_shared(x_TC, step)
        return z_TC if shared_TC is None else self._add_shared(z_TC, shared_TC)

    @property
    def quant(self) -> FakeQuant | None:
        """The rounding of the input that should come with it."""
        return common_quant(self.shared_experts.w1, self.shared_experts.w3)

    def routed_and_shared(
        self, x_TC: torch.Tensor, step: Step, rounded_TC: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output of the routed experts, fp32, and of the shared one, in x's dtype: [T, C] each.

        With several processes their sum and None: it is made where the parts of all are.
        """
        adapter_T = step.batch.adapter_T
        if self._host is None:
            with self._side.branch():
                shared_TC = self.shared_experts(x_TC, adapter_T, rounded_TC)
            ids_TK, weights_TK = self.gate(x_TC, step)
            routed = self.experts.begin(x_TC, ids_TK, weights_TK, adapter_T)
        else:  # the host begins as soon as it knows the experts
            self._host.expect(self._index, x_TC)
            ids_TK, weights_TK = self.gate(x_TC, step)
            routed = self.experts.begin(x_TC, ids_TK, weights_TK, adapter_T)
            shared_TC = self.shared_experts(x_TC, adapter_T, rounded_TC)
        routed_TC = routed()
        self._side.join()
        return self._group.total(routed_TC, shared_TC, x_TC.dtype)
