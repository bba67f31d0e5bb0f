"""What a compressor keeps of a token until its group closes (spec v4 5.1)."""

from __future__ import annotations

import torch


def compress_rows(
    kv_TE: torch.Tensor, gate_TE: torch.Tensor, ape_BE: torch.Tensor | None, phase_T: torch.Tensor
) -> torch.Tensor:
    """out_T2E = [kv | gate + ape_phase], fp32; `phase_T` int64 is a token's place in its group."""
    if ape_BE is not None:
        gate_TE = gate_TE + ape_BE.index_select(0, phase_T)
    return torch.cat([kv_TE, gate_TE], dim=-1)
