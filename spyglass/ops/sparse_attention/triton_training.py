"""What lies between the products of attention's backward, in one launch; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_VALUES = 2048  # of a program, where a row of logits is not longer


def softmax_gradient(
    products_MRK: torch.Tensor, seen_MQK: torch.Tensor, sink_H: torch.Tensor, scale: float, out_MRK: torch.Tensor
) -> torch.Tensor:
    """From [q k | g k] (fp32, R = 2 Q H) write [scale dl | p] of the activation dtype; contiguous all.

    Returns what each row and head adds to the gradient of the sink, fp32 [M Q, H].
    """
    count, queries, keys = seen_MQK.shape
    heads = len(sink_H)
    dsink_QH = torch.empty(count * queries, heads, dtype=torch.float32, device=sink_H.device)
    if dsink_QH.numel() == 0:
        return dsink_QH
    KEYS = max(triton.next_power_of_2(keys), 16)
    HEADS = min(max(_VALUES // KEYS, 1), triton.next_power_of_2(heads))
    _softmax_gradient[(count * queries, triton.cdiv(heads, HEADS))](
        products_MRK,
        seen_MQK.view(torch.uint8),
        sink_H,
        out_MRK,
        dsink_QH,
        queries,
        heads,
        keys,
        scale,
        HEADS=HEADS,
        KEYS=KEYS,
        num_warps=4 if KEYS <= 2048 else 8 if KEYS <= 8192 else 16,
        enable_fp_fusion=False,
    )
    return dsink_QH


@triton.jit(do_not_specialize=["queries", "keys"])
def _softmax_gradient(
    products_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    out_ptr: tl.tensor,
    dsink_ptr: tl.tensor,
    queries: tl.tensor,
    heads: tl.tensor,
    keys: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part, query = row // queries, row % queries
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    key = tl.arange(0, KEYS)[None, :]
    real = head < heads
    there = real[:, None] & (key < keys)
    first = ((part * 2 * queries + query) * heads + head[:, None]) * keys + key
    other = first + (queries * heads).to(tl.int64) * keys
    seen = tl.load(seen_ptr + row * keys + key, mask=key < keys, other=0) != 0
    logits = tl.load(products_ptr + first, mask=there, other=0.0) * scale
    logits = tl.where(seen & there, logits, float("-inf"))
    sink = tl.load(sink_ptr + head, mask=real, other=0.0).to(tl.float32)
    top = tl.maximum(tl.max(logits, axis=1), sink)
    p = tl.exp(logits - top[:, None])
    beside = tl.exp(sink - top)
    total = tl.sum(p, axis=1) + beside
    p = p / total[:, None]
    dp = tl.load(products_ptr + other, mask=there, other=0.0)
    delta = tl.sum(p * dp, axis=1)
    dlogits = p * (dp - delta[:, None]) * scale
    tl.store(out_ptr + first, dlogits.to(out_ptr.dtype.element_ty), mask=there)
    tl.store(out_ptr + other, p.to(out_ptr.dtype.element_ty), mask=there)
    tl.store(dsink_ptr + row * heads + head, -delta * beside / total, mask=real)
