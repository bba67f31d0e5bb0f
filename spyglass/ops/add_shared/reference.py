"""Routed experts and the shared one together (spec v4 7.4)."""

from __future__ import annotations

import torch


def add_shared(routed_TC: torch.Tensor, shared_TC: torch.Tensor) -> torch.Tensor:
    """out = routed (fp32) + shared, summed in fp32, rounded once to the dtype of `shared_TC`."""
    return (routed_TC + shared_TC).to(shared_TC.dtype)
