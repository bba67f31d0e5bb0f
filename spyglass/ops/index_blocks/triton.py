"""The kernels of `index_topk`: the best score of every block to scratch, then an exact choice among them."""

from __future__ import annotations

import torch

from spyglass.ops import stored
from spyglass.ops.gpu import usable
from spyglass.ops.index_blocks import reference
from spyglass.ops.index_topk.triton import score, scoring, select, suits
from spyglass.quant.formats import StoredRow

__all__ = ["index_blocks", "usable"]

_SCORES_AT_ONCE = 1 << 26
_MOST_BLOCKS = 1 << 15


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
    """See `reference.py`, which also serves blocks of other sizes than powers of two and more than 32,768 blocks.

    Raises:
        DeviceError: keys are bytes of no format.
    """
    blocks = -(-max_visible // block_size) if block_size else 0
    if not suits(q_TNI, keys_NBI, max_visible, key_format) or block_size & (block_size - 1) or blocks > _MOST_BLOCKS:
        return reference.index_blocks(
            q_TNI,
            weights_TN,
            keys_NBI,
            table_SP,
            seq_T,
            visible_T,
            num_blocks=num_blocks,
            block_size=block_size,
            max_visible=max_visible,
            stepwise=stepwise,
            weight_scale=weight_scale,
            key_format=key_format,
        )
    row = stored.row_code("index_blocks", keys_NBI, key_format)
    blocks_TY = torch.empty(len(q_TNI), min(num_blocks, blocks), dtype=torch.int32, device=q_TNI.device)
    step = max(1, _SCORES_AT_ONCE // blocks)
    few, how = num_blocks * block_size, scoring(q_TNI, listed=False)
    for t in range(0, len(q_TNI), step):
        part = slice(t, t + step)
        rows = (q_TNI[part], weights_TN[part], keys_NBI, table_SP, seq_T[part], visible_T[part])
        _, best = score(rows, max_visible, stepwise, weight_scale, few, None, 0, block_size, False, how, row)
        select(best, best, visible_T[part], blocks_TY[part], num_blocks, unit=block_size, pinned=True)
    return blocks_TY
