"""Even use of experts without a loss term: the bias that only chooses is moved towards experts used too little.

bias_e <- bias_e + rate · sign(mean load - load_e), for text rows and picture rows each with their own bias
(`gate.bias`, `gate.bias_vl`); a layer that routes text by token id has no use for the former.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from spyglass.config.model import TextConfig

BIASES = (".ffn.gate.bias", ".ffn.gate.bias_vl")  # ends of the names of what is moved


@torch.no_grad()
def balance(
    biases: Mapping[str, torch.Tensor], loads: Sequence[torch.Tensor], text: TextConfig, rate: torch.Tensor | float
) -> None:
    """Move the biases (fp32 [E], by checkpoint name, the very tensors the model holds) in place.

    `loads` [2, E] per layer: how often each expert was chosen by text rows, by picture rows.
    """
    assert len(loads) == text.num_hidden_layers, (len(loads), text.num_hidden_layers)
    for plan, load_2E in zip(text.layers, loads, strict=True):
        step_2E = rate * torch.sign(load_2E.mean(dim=1, keepdim=True) - load_2E)
        for name, step_E in zip(BIASES, step_2E, strict=True):
            bias_E = biases.get(f"layers.{plan.index}{name}")
            if bias_E is not None:
                bias_E.add_(step_E)


def imbalance(loads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Largest share of one expert over the even share, of all layers and both kinds of rows; 1 = even."""
    stacked = torch.stack(list(loads))
    return (stacked.amax(dim=-1) / stacked.mean(dim=-1).clamp(min=1e-9)).amax()
