"""Queries that follow one another share window rows, single ones read theirs where they lie: `csrc/attention.cpp`."""

from __future__ import annotations

import torch

from spyglass.errors import DeviceError
from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.native import Kernels
from spyglass.ops.rope_partial.cpu import rope_partial
from spyglass.ops.row_finish.cpu import row_finish
from spyglass.ops.sparse_attention.reference import Turn
from spyglass.quant.formats import StoredRow

__all__ = ["sparse_attention", "usable"]


def sparse_attention(
    q_THD: torch.Tensor,
    window_NBD: torch.Tensor,
    window_table_SP: torch.Tensor,
    seq_T: torch.Tensor,
    lo_T: torch.Tensor,
    hi_T: torch.Tensor,
    sink_H: torch.Tensor,
    *,
    scale: float,
    window_width: int,
    pool_NBD: torch.Tensor | None = None,
    pool_table_SP: torch.Tensor | None = None,
    visible_T: torch.Tensor | None = None,
    topk_indices_TX: torch.Tensor | None = None,
    pool_width: int = 0,
    turn: Turn | None = None,
    window_format: StoredRow | None = None,
    pool_format: StoredRow | None = None,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """See `reference.py`. Memory per thread is linear in the keys of one query; the softmax knows its maximum first.

    Raises:
        DeviceError: an input wants a gradient, a dtype has no kernel, pages are strided or of two dtypes.
    """
    native.refuse_gradient("sparse_attention", q_THD, window_NBD, pool_NBD, sink_H)
    if turn is not None:
        q_THD = row_finish(q_THD, turn.cos_TR, turn.sin_TR, eps=turn.eps, stepwise=turn.stepwise, kernels=kernels)
    dtype = native.dtype_code("sparse_attention", q_THD)
    near = far = native.row_code("sparse_attention", window_NBD, window_format)
    if pool_width == 0:
        pool_NBD = None
    if pool_NBD is not None:
        far = native.row_code("sparse_attention", pool_NBD, pool_format)
        if pool_NBD.dtype != window_NBD.dtype:
            raise DeviceError("the CPU kernel of sparse_attention needs pools of the window's dtype")
    rows, heads, width = q_THD.shape
    q_THD, sink_H = q_THD.contiguous(), native.float32(sink_H)
    window_table_SP, seq_T = native.int32(window_table_SP), native.int32(seq_T)
    lo_T, hi_T = native.int32(lo_T), native.int32(hi_T)
    page_rows, pool_columns = 1, 1
    if pool_NBD is None:
        pool_table_SP = visible_T = topk_indices_TX = None
    else:
        assert pool_table_SP is not None and visible_T is not None
        pool_table_SP, visible_T = native.int32(pool_table_SP), native.int32(visible_T)
        topk_indices_TX = None if topk_indices_TX is None else native.int32(topk_indices_TX)
        page_rows, pool_columns = pool_NBD.shape[1], pool_table_SP.shape[1]
    out_THD = torch.empty_like(q_THD)
    (kernels or native.best()).attention(
        q_THD.data_ptr(), dtype, rows, heads, width, window_NBD.data_ptr(), near, window_NBD.shape[1],
        window_table_SP.data_ptr(), window_table_SP.shape[1], seq_T.data_ptr(), lo_T.data_ptr(), hi_T.data_ptr(),
        sink_H.data_ptr(), scale, window_width, native.address(pool_NBD), far, page_rows,
        native.address(pool_table_SP), pool_columns, native.address(visible_T), native.address(topk_indices_TX),
        0 if topk_indices_TX is None else topk_indices_TX.shape[1], pool_width, out_THD.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    if turn is not None:
        out_THD = rope_partial(out_THD, turn.cos_TR, turn.sin_TR, inverse=True, kernels=kernels)
    return out_THD
