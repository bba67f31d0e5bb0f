"""Memory for rows of the cache: what a plan of them comes to as a tensor."""

from __future__ import annotations

import torch

from spyglass.config.cache import CachePlan

_ALL_ONES = 255


def new_rows(plan: CachePlan, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Memory for (pages, rows of a page), not filled, of a model whose activations have `dtype`."""
    if plan.stored is not None:
        return torch.empty(*shape, plan.stored.row_bytes, dtype=torch.uint8, device=device)
    own = dtype if plan.dtype == "activation" else torch.float32
    return torch.empty(*shape, plan.row_dim, dtype=own, device=device)


def poison(rows: torch.Tensor, value: float = float("nan")) -> torch.Tensor:
    """Fill rows with a value, stored ones with bytes that read as NaN in every format."""
    return rows.fill_(_ALL_ONES if rows.dtype == torch.uint8 else value)
