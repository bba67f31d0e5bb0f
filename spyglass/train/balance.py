"""Even use of experts without a loss term: the bias that only chooses is moved towards experts used too little.

bias_e <- bias_e + rate · sign(mean load - load_e), for text rows and image rows each with their own bias
(`gate.bias`, `gate.bias_vl`); a layer that routes text by token id has no use for the former.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spyglass.config.model import TextConfig
from spyglass.ops.router_topk.reference import router_topk

BIASES = (".ffn.gate.bias", ".ffn.gate.bias_vl")  # ends of the names of what is moved


@torch.no_grad()
def balance(
    biases: Mapping[str, torch.Tensor], loads: Sequence[torch.Tensor], text: TextConfig, rate: torch.Tensor | float
) -> None:
    """Move the biases (fp32 [E], by checkpoint name, the very tensors the model holds) in place.

    `loads` [2, E] per layer: how often each expert was chosen by text rows, by image rows.
    """
    assert len(loads) == text.num_hidden_layers, (len(loads), text.num_hidden_layers)
    for plan, load_2E in zip(text.layers, loads, strict=True):
        step_2E = rate * torch.sign(load_2E.mean(dim=1, keepdim=True) - load_2E)
        for name, step_E in zip(BIASES, step_2E, strict=True):
            bias_E = biases.get(f"layers.{plan.index}{name}")
            if bias_E is not None:
                bias_E.add_(step_E)


@dataclass(slots=True)
class ExpertLoads:
    """How often experts are chosen in a step. `real_T` bool: rows that count; `loads` fp32 [2, E] per routed layer in
    order: choices of text rows, of image rows."""

    real_T: torch.Tensor | None = None
    loads: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CountingRouter:
    """The op `router_topk`, which also adds to `loads`."""

    state: ExpertLoads

    def __call__(
        self, x_TC: torch.Tensor, weight_EC: torch.Tensor, *, is_image_T: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids_TK, weights_TK = router_topk(x_TC, weight_EC, is_image_T=is_image_T, **options)
        with torch.no_grad():
            real_T = self.state.real_T
            assert real_T is not None
            image = torch.zeros_like(real_T) if is_image_T is None else is_image_T
            chosen_TE = torch.nn.functional.one_hot(ids_TK.long(), len(weight_EC)).sum(dim=1).float()
            self.state.loads.append(torch.stack([real_T & ~image, real_T & image]).float() @ chosen_TE)
        return ids_TK, weights_TK
