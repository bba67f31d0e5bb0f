"""The kernels behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "ranks"])
def shrink(
    x, adapter_T, a, adapter_R, scale_R, u, rows, ranks,
    G: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, NS: tl.constexpr,
) -> None:  # fmt: skip
    """u [T, G, R] fp32: what each adapter's rank rows make of its own rows, 0 for those of others."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    g = tl.program_id(2)
    own = (
        tl.load(adapter_T + t, mask=t < rows, other=0)[:, None]
        == tl.load(adapter_R + r, mask=r < ranks, other=-1)[None, :]
    )
    acc = tl.zeros((BT, BR), tl.float32)
    if tl.max(tl.max(own.to(tl.int32), 1), 0) > 0:
        k = tl.arange(0, BK)
        xp = x + (t.to(tl.int64) * G + g)[:, None] * K + k[None, :]
        ap = a + r.to(tl.int64)[None, :] * K + k[:, None]
        for first in tl.range(0, K, BK, num_stages=NS):
            left = tl.load(xp + first, mask=(t < rows)[:, None] & (first + k < K)[None, :], other=0.0)
            right = tl.load(ap + first, mask=(r < ranks)[None, :] & (first + k < K)[:, None], other=0.0)
            if left.dtype != right.dtype:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            acc = tl.dot(left, right, acc, input_precision="ieee")
        acc = acc * tl.load(scale_R + r, mask=r < ranks, other=0.0)[None, :]
    place = (t.to(tl.int64) * G + g)[:, None] * ranks + r[None, :]
    tl.store(u + place, tl.where(own, acc, 0.0), mask=(t < rows)[:, None] & (r < ranks)[None, :])


@triton.jit(do_not_specialize=["rows", "ranks"])
def expand(
    u, adapter_T, b, adapter_R, out, rows, ranks,
    G: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
) -> None:  # fmt: skip
    """out [T, G, N] fp32 = u · b; rank rows that belong to no row of the tile are not read."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    g = tl.program_id(2)
    adapter_id = tl.load(adapter_T + t, mask=t < rows, other=0)
    acc = tl.zeros((BT, BN), tl.float32)
    for first in tl.range(0, ranks, BR, num_stages=1):
        r = first + tl.arange(0, BR)
        own = adapter_id[:, None] == tl.load(adapter_R + r, mask=r < ranks, other=-1)[None, :]
        if tl.max(tl.max(own.to(tl.int32), 1), 0) > 0:
            inside = (t < rows)[:, None] & (r < ranks)[None, :]
            left = tl.load(u + (t.to(tl.int64) * G + g)[:, None] * ranks + r[None, :], mask=inside, other=0.0)
            right = tl.load(
                b + (r.to(tl.int64) * G + g)[:, None] * N + n[None, :],
                mask=(r < ranks)[:, None] & (n < N)[None, :],
                other=0.0,
            )
            acc = tl.dot(left, right.to(tl.float32), acc, input_precision="ieee")
    place = (t.to(tl.int64) * G + g)[:, None] * N + n[None, :]
    tl.store(out + place, acc, mask=(t < rows)[:, None] & (n < N)[None, :])
