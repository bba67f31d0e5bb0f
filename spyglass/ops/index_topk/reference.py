"""The indexer's choice: which compressed entries a query attends (spec v4 5.5)."""

from __future__ import annotations

import torch

from spyglass.ops.sparse_attention.reference import flat_rows
from spyglass.quant.formats import StoredRow
from spyglass.quant.rows import read_rows

SCORES_AT_ONCE = 1 << 24


def index_topk(
    q_TNI: torch.Tensor,
    weights_TN: torch.Tensor,
    keys_NBI: torch.Tensor,
    table_SP: torch.Tensor,
    seq_T: torch.Tensor,
    visible_T: torch.Tensor,
    *,
    k: int,
    max_visible: int,
    stepwise: bool,
    weight_scale: float = 1.0,
    blocks_TY: torch.Tensor | None = None,
    block_size: int = 0,
    key_format: StoredRow | None = None,
) -> torch.Tensor:
    """score_TP = Σ_n relu(q_TNI · k_PI) · w_TN with w = weights · scale, rounded to the dtype of the weights;
    topk_indices_TX int32 = the min(k, max_visible) best visible entries, ascending, -1 = none.

    Entry p is visible to row t when p < visible_T[t] <= max_visible. Ties go to the lowest entry. `stepwise` rounds
    the dot products, the weighted products and the sum to q's dtype, as the reference does; otherwise all is fp32.
    With `blocks_TY` (int32, ascending, each once, then -1) only entries of the listed blocks of `block_size` may be
    picked (spec v41 3.3). Keys that are bytes are rows of `key_format`.
    """
    weights_TN = weights_TN * weight_scale
    heads, x = q_TNI.shape[1], min(k, max_visible)
    step = max(1, SCORES_AT_ONCE // max(1, heads * max_visible))
    parts = [
        _pick(
            index_scores(
                q_TNI[t : t + step],
                weights_TN[t : t + step],
                keys_NBI,
                table_SP,
                seq_T[t : t + step],
                visible_T[t : t + step],
                max_visible=max_visible,
                stepwise=stepwise,
                key_format=key_format,
            ),
            x,
            None if blocks_TY is None else allowed(blocks_TY[t : t + step], block_size, max_visible),
        )
        for t in range(0, len(q_TNI), step)
    ]
    return torch.cat(parts) if parts else torch.empty(0, x, dtype=torch.int32, device=q_TNI.device)


def index_scores(
    q_TNI: torch.Tensor,
    weights_TN: torch.Tensor,
    keys_NBI: torch.Tensor,
    table_SP: torch.Tensor,
    seq_T: torch.Tensor,
    visible_T: torch.Tensor,
    *,
    max_visible: int,
    stepwise: bool,
    key_format: StoredRow | None = None,
) -> torch.Tensor:
    """Scores fp32 [T, max_visible]; -inf where an entry is not visible."""
    dtype = q_TNI.dtype if stepwise else torch.float32
    entry = torch.arange(max_visible, device=q_TNI.device)[None].expand(len(q_TNI), -1)
    ok = entry < visible_T[:, None]
    rows = flat_rows(table_SP, seq_T, torch.where(ok, entry, 0), keys_NBI.shape[1]).clamp(min=0)
    keys = read_rows(keys_NBI.flatten(0, 1)[rows], key_format, torch.float32)
    dots = torch.einsum("tni,tpi->tnp", q_TNI.float(), torch.where(ok[:, :, None], keys, 0.0)).to(dtype)
    weighted = (dots.relu().float() * weights_TN.float()[:, :, None]).to(dtype)
    return weighted.float().sum(dim=1).to(dtype).float().masked_fill(~ok, float("-inf"))


def allowed(blocks_TY: torch.Tensor, block_size: int, max_visible: int) -> torch.Tensor:
    """Which entries lie in the listed blocks, bool [T, max_visible]."""
    num_blocks = -(-max_visible // block_size)
    listed_TB = torch.zeros(len(blocks_TY), num_blocks + 1, dtype=torch.bool, device=blocks_TY.device)
    listed_TB.scatter_(1, torch.where(blocks_TY < 0, num_blocks, blocks_TY).long(), True)
    return listed_TB[:, :-1].repeat_interleave(block_size, dim=1)[:, :max_visible]


def _pick(scores_TP: torch.Tensor, x: int, allowed_TP: torch.Tensor | None) -> torch.Tensor:
    if allowed_TP is not None:
        scores_TP = scores_TP.masked_fill(~allowed_TP, float("-inf"))
    ranked = scores_TP.sort(dim=-1, descending=True, stable=True)
    none = torch.iinfo(torch.int32).max
    topk_indices = torch.where(ranked.values[:, :x] == float("-inf"), none, ranked.indices[:, :x]).sort(dim=-1).values
    return torch.where(topk_indices == none, -1, topk_indices).to(torch.int32)
