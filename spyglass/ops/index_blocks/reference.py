"""The first of two selection levels: which blocks of entries later indexers may choose from (spec v41 3.3)."""

from __future__ import annotations

import torch

from spyglass.ops.index_topk.reference import index_scores
from spyglass.quant.formats import StoredRow

SCORES_AT_ONCE = 1 << 24


def index_blocks(
    q_TNI: torch.Tensor,
    weights_TN: torch.Tensor,
    keys_NBI: torch.Tensor,
    table_SP: torch.Tensor,
    seq_T: torch.Tensor,
    visible_T: torch.Tensor,
    *,
    num_blocks: int,
    block_size: int,
    max_visible: int,
    stepwise: bool,
    weight_scale: float = 1.0,
    key_format: StoredRow | None = None,
) -> torch.Tensor:
    """blocks_TY int32 = the min(num_blocks, blocks) best blocks of `block_size` entries, ascending, -1 = none.

    A block scores as its best visible entry; the block of the newest visible entry is always among them. Scores are
    those of `index_topk`; a block without a visible entry is never listed. Ties go to the lowest block.
    """
    weights_TN = weights_TN * weight_scale
    step = max(1, SCORES_AT_ONCE // max(1, q_TNI.shape[1] * max_visible))
    parts = []
    for t in range(0, len(q_TNI), step):
        rows = slice(t, t + step)
        scores_TP = index_scores(
            q_TNI[rows],
            weights_TN[rows],
            keys_NBI,
            table_SP,
            seq_T[rows],
            visible_T[rows],
            max_visible=max_visible,
            stepwise=stepwise,
            key_format=key_format,
        )
        parts.append(best_blocks(scores_TP, visible_T[rows], num_blocks=num_blocks, block_size=block_size))
    width = min(num_blocks, -(-max_visible // block_size))
    return torch.cat(parts) if parts else torch.empty(0, width, dtype=torch.int32, device=q_TNI.device)


def best_blocks(scores_TP: torch.Tensor, visible_T: torch.Tensor, *, num_blocks: int, block_size: int) -> torch.Tensor:
    """The choice of `index_blocks` for given scores fp32 [T, P], -inf where an entry is not visible."""
    count = -(-scores_TP.shape[1] // block_size)
    padded = torch.nn.functional.pad(scores_TP, (0, count * block_size - scores_TP.shape[1]), value=float("-inf"))
    best_TB = padded.unflatten(1, (count, block_size)).amax(dim=-1)
    newest_T = (visible_T.long() - 1).div(block_size, rounding_mode="floor")
    is_newest_TB = torch.arange(count, device=scores_TP.device) == newest_T[:, None]
    best_TB = best_TB.masked_fill(is_newest_TB, float("inf"))
    ranked = best_TB.sort(dim=-1, descending=True, stable=True)
    kept, none = min(num_blocks, count), torch.iinfo(torch.int32).max
    blocks = torch.where(ranked.values[:, :kept] == float("-inf"), none, ranked.indices[:, :kept]).sort(dim=-1).values
    return torch.where(blocks == none, -1, blocks).to(torch.int32)
