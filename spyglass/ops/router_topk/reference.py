"""Which experts a token goes to, and with what weight (spec v4 7.1-7.3)."""

from __future__ import annotations

import torch


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
    """s_TE = sqrt(softplus(x · Wᵀ)) in full fp32; ids_TK int32 = top-k of s + bias; weights_TK fp32 = scale · s / Σ s.

    Image rows (`is_image_T` bool) use `bias_image_E` instead of `bias_E`, and never the forced choice. Other rows
    take `forced_TK` when it is given (hash layers), or row `forced_row_T` (int64) of it where it is a table; weights
    come from s in every case. Ties go to the lowest expert id. Padding rows (`positions_T` int32 is -1) get ids
    -1 and weights 0.
    """
    square_TE = torch.nn.functional.softplus(x_TC.float() @ weight_EC.float().mT)
    # the root has no gradient at 0, where a very negative product underflows to
    scores_TE = torch.where(square_TE > 0, square_TE, 1.0).sqrt().masked_fill(square_TE == 0, 0.0)
    ranked_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if is_image_T is not None:
        assert bias_image_E is not None
        ranked_TE = torch.where(is_image_T[:, None], scores_TE + bias_image_E, ranked_TE)
    ids_TK = ranked_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    if forced_TK is not None:
        forced_TK = (forced_TK if forced_row_T is None else forced_TK.index_select(0, forced_row_T)).to(ids_TK.dtype)
        ids_TK = forced_TK if is_image_T is None else torch.where(is_image_T[:, None], ids_TK, forced_TK)
    weights_TK = scores_TE.gather(1, ids_TK)
    weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True) * scale
    ids_TK = ids_TK.to(torch.int32)
    if positions_T is not None:
        padding_T1 = positions_T[:, None] < 0
        ids_TK, weights_TK = ids_TK.masked_fill(padding_T1, -1), weights_TK.masked_fill(padding_T1, 0.0)
    return ids_TK, weights_TK
