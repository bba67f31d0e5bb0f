"""Scores with keys in lanes, selection per query; T x P x N is never stored: `csrc/index.cpp`."""

from __future__ import annotations

import torch

from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels
from spyglass.quant.formats import StoredRow

__all__ = ["index_topk", "usable"]


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
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """See `reference.py`. Where no more entries are visible than may be picked, they are picked without a score.

    Raises:
        DeviceError: an input wants a gradient, a dtype or format has no kernel, or the keys are strided.
    """
    native.refuse_gradient("index_topk", q_TNI, weights_TN, keys_NBI)
    q_dtype, key_code = native.dtype_code("index_topk", q_TNI), native.row_code("index_topk", keys_NBI, key_format)
    weight_dtype = native.dtype_code("index_topk", weights_TN)
    rows, heads, width = q_TNI.shape
    q_TNI, weights_TN, table_SP = q_TNI.contiguous(), weights_TN.contiguous(), native.int32(table_SP)
    seq_T, visible_T = native.int32(seq_T), native.int32(visible_T)
    blocks_TY = None if blocks_TY is None else native.int32(blocks_TY)
    topk_indices_TX = torch.empty((rows, min(k, max_visible)), dtype=torch.int32)
    (kernels or native.best()).index_topk(
        q_TNI.data_ptr(), q_dtype, weights_TN.data_ptr(), weight_dtype, weight_scale, rows, heads, width,
        keys_NBI.data_ptr(), key_code, keys_NBI.shape[1], table_SP.data_ptr(), table_SP.shape[1], seq_T.data_ptr(),
        visible_T.data_ptr(), native.address(blocks_TY), 0 if blocks_TY is None else blocks_TY.shape[1], block_size,
        topk_indices_TX.shape[1], max_visible, stepwise, topk_indices_TX.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return topk_indices_TX
