"""The kernel behind `triton.py`; importing it needs Triton.

A program holds a tile of queries of one head of one image and walks over the image's keys, keeping the running
maximum, the sum of weights and the weighted values in fp32 (the usual online softmax, in powers of two).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spyglass.ops.gpu import here

_LOG2_E = 1.4426950408889634
# The fastest of 15 shapes for 784, 3,312 and 9,000 patches of 16 heads of 64 channels on an H200 (docs/log.md).
_QUERIES, _KEYS = 64, 64


def attend(
    q_UHD: torch.Tensor,
    k_UHD: torch.Tensor,
    v_UHD: torch.Tensor,
    out_UHD: torch.Tensor,
    cu_seqlens_I1: torch.Tensor,
    longest: int,
    scale: float,
) -> None:
    """Write attention inside each image into `out_UHD` (contiguous); rows that belong to no image stay unwritten.

    `longest`: no image has more patches.
    """
    heads, dim = q_UHD.shape[1:]
    images = len(cu_seqlens_I1) - 1
    if longest == 0 or images == 0:
        return
    _attend[(triton.cdiv(longest, _QUERIES), heads, images)](
        q_UHD,
        k_UHD,
        v_UHD,
        out_UHD,
        cu_seqlens_I1,
        scale * _LOG2_E,
        q_UHD.stride(0),
        q_UHD.stride(1),
        k_UHD.stride(0),
        k_UHD.stride(1),
        v_UHD.stride(0),
        v_UHD.stride(1),
        out_UHD.stride(0),
        out_UHD.stride(1),
        DIM=dim,
        QUERIES=_QUERIES,
        KEYS=_KEYS,
        # wider heads on generations whose products leave no room in registers (no warp-group products)
        num_warps=4 if dim < 128 else here().tower_warps,
        num_stages=3,
    )


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, out_ptr, cu_seqlens_ptr, scale, q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
    DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + tl.program_id(2)).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + tl.program_id(2) + 1).to(tl.int64) - start).to(tl.int32)
    first = tl.program_id(0) * QUERIES
    if first >= length:
        return
    query = first + tl.arange(0, QUERIES)
    key = tl.arange(0, KEYS)
    channel = tl.arange(0, DIM)
    there = query[:, None] < length
    q = tl.load(
        q_ptr + start * q_row + head * q_head + query[:, None] * q_row + channel[None, :], mask=there, other=0.0
    )
    k_at = k_ptr + start * k_row + head * k_head + key[None, :] * k_row + channel[:, None]
    v_at = v_ptr + start * v_row + head * v_head + key[:, None] * v_row + channel[None, :]
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, DIM], tl.float32)
    whole = length // KEYS * KEYS
    for _ in range(0, whole, KEYS):
        top, total, mixed = _step(q, tl.load(k_at), tl.load(v_at), top, total, mixed, scale, KEYS, False, KEYS)
        k_at += KEYS * k_row
        v_at += KEYS * v_row
    if whole < length:
        left = length - whole
        k = tl.load(k_at, mask=key[None, :] < left, other=0.0)
        v = tl.load(v_at, mask=key[:, None] < left, other=0.0)
        top, total, mixed = _step(q, k, v, top, total, mixed, scale, left, True, KEYS)
    out = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
    to = out_ptr + start * out_row + head * out_head + query[:, None] * out_row + channel[None, :]
    tl.store(to, out, mask=there)


@triton.jit
def _step(
    q, k, v, top, total, mixed, scale, left, LAST: tl.constexpr, KEYS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One tile of keys, the last one only `left` long; weights are relative to `top`, the largest logit so far."""
    logit = tl.dot(q, k)
    if LAST:
        logit = tl.where(tl.arange(0, KEYS)[None, :] < left, logit, float("-inf"))
    higher = tl.maximum(top, tl.max(logit, 1) * scale)
    weight = tl.exp2(logit * scale - higher[:, None])
    kept = tl.exp2(top - higher)
    total = total * kept + tl.sum(weight, 1)
    mixed = tl.dot(weight.to(v.dtype), v, mixed * kept[:, None])
    return higher, total, mixed
