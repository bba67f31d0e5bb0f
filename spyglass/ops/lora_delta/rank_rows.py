"""An adapter's addend that is not multiplied out: a map that can takes it into its own product."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spyglass.ops.lora_delta.reference import lora_delta


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRows:
    """The arguments of `lora_delta`, x [T, G, I]."""

    x_TGI: torch.Tensor
    adapter_T: torch.Tensor
    a_RI: torch.Tensor
    b_RGO: torch.Tensor
    adapter_R: torch.Tensor
    scale_R: torch.Tensor

    def multiplied(self) -> torch.Tensor:
        """fp32 [T, G, O]."""
        return lora_delta(self.x_TGI, self.adapter_T, self.a_RI, self.b_RGO, self.adapter_R, self.scale_R)
