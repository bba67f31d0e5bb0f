"""Two launches: scores, their inner side shared out while rows are few; then choice and weights of each row."""

from __future__ import annotations

from typing import Any

import torch

from spyglass.ops.gpu import learns, usable
from spyglass.ops.router_topk import reference

__all__ = ["router_topk", "usable"]


def router_topk(
    x_TC: torch.Tensor,
    weight_EC: torch.Tensor,
    *,
    k: int,
    scale: float,
    bias_E: torch.Tensor | None,
    bias_image_E: torch.Tensor | None = None,
    is_image_T: torch.Tensor | None = None,
    forced_TK: torch.Tensor | None = None,
    forced_row_T: torch.Tensor | None = None,
    positions_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.py`, which also serves gradients and float64."""
    options: dict[str, Any] = {
        "scale": scale, "bias_E": bias_E, "bias_image_E": bias_image_E, "is_image_T": is_image_T,
        "forced_row_T": forced_row_T, "positions_T": positions_T,
    }  # fmt: skip
    if learns(x_TC, weight_EC, bias_E) or x_TC.dtype == torch.float64:
        return reference.router_topk(x_TC, weight_EC, k=k, forced_TK=forced_TK, **options)
    from spyglass.ops.router_topk.triton_kernel import choose, project

    rows = len(x_TC)
    ids_TK = torch.empty((rows, k), dtype=torch.int32, device=x_TC.device)
    weights_TK = torch.empty((rows, k), dtype=torch.float32, device=x_TC.device)
    logits_TSE = project(x_TC.contiguous(), weight_EC.contiguous())
    forced_TK = None if forced_TK is None else forced_TK.contiguous()
    choose(logits_TSE, ids_TK, weights_TK, forced_TK=forced_TK, **options)
    return ids_TK, weights_TK
