"""The kernels behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from spyglass.ops.linear_block.triton_decode import (
    add_fields,
    decode_fp8,
    input_fields,
    round_e4m3,
    scale_pair,
    scale_words,
    settled,
    weight_fields,
    weight_words,
)

LOWEST: tl.constexpr = tl.constexpr(-(1 << 63))  # below every key


@triton.jit
def _key(v, place) -> tl.tensor:
    """A number that is the larger, the larger v is, NaN the largest, and among equals the smaller its place."""
    bits = (v + 0.0).to(tl.int32, bitcast=True)
    high = tl.where(v != v, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (high.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit(do_not_specialize=["values"])
def round_rows(x, out, values, BLOCK: tl.constexpr, SIZE: tl.constexpr, ORDER: tl.constexpr, PDL: tl.constexpr) -> None:
    """`fake_quant` of rows whose width is a multiple of 128, SIZE values a program, stored in the order of a product.

    ORDER 0: as they come; 4: for `decode_fp4`, eight inputs of each of its four values; 40, 41, 80: for the
    tensor-core tiles of many rows, FP4, tiled FP4 and FP8.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + place, mask=place < values, other=0.0).to(tl.float32)
    if BLOCK > 0:
        v = tl.reshape(v, (SIZE // BLOCK, BLOCK))
        v = tl.reshape(round_e4m3(v, tl.max(tl.abs(v), 1)[:, None]), (SIZE,))
    k = place
    if ORDER == 4:
        k = place // 32 * 32 + place % 4 * 8 + place % 32 // 4
    if ORDER == 40:  # inputs [4 lanes, r2, r1, r0, 4 p] to [p, r2, r1, lane, r0]
        k = (
            place // 128 * 128
            + place % 4 * 32
            + place // 16 % 2 * 16
            + place // 8 % 2 * 8
            + place // 32 % 4 * 2
            + place // 4 % 2
        )
    if ORDER == 41:  # the same for tiled weights: inputs [4 lanes, p, r2, r1, r0]
        k = place // 128 * 128 + place // 2 % 16 * 8 + place // 32 % 4 * 2 + place % 2
    if ORDER == 80:  # inputs [4 lanes, p, r2, r1, r0] to [p, r2, r1, lane, r0]
        k = place // 64 * 64 + place // 2 % 8 * 8 + place // 16 % 4 * 2 + place % 2
    tl.store(out + k, v.to(out.dtype.element_ty), mask=place < values)


@triton.jit
def _chunk(
    acc, words, c, xp, there, s, n, begin, lane, K,
    FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    NW: tl.constexpr, STEPS: tl.constexpr, ASM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    scales = scale_words(s, n, begin, lane, c, K, FORMAT, BLOCK_N, BLOCK_K, STEPS, False)
    for j in tl.static_range(STEPS):
        inputs = input_fields(xp + (c * STEPS + j) * (512 // FORMAT), there, FORMAT, BM, NW)
        acc = add_fields(
            acc, weight_fields(words[j], scales[j], lane * 8, FORMAT, False, ASM), inputs, 16 // FORMAT, BN, NW
        )
    return acc


@triton.jit
def _few_sums(
    x, w, s, rows, first, N, K, group, groups,
    FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    NW: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[BN, BM]: weight rows from `first` on times at most BM rows of x [rows, groups, K]; they read `group`."""
    P: tl.constexpr = 16 // FORMAT
    chunks = K // (32 * P * STEPS * NW)
    KW = chunks * (32 * P * STEPS)
    K = KW * NW  # the same, and seen to be a multiple
    la = tl.arange(0, BN * 4 * NW)
    lb = tl.arange(0, BM * 4 * NW)
    r8 = tl.arange(0, 8)[None, :]
    n = tl.minimum(first + la // (32 * NW) * 8 + la // 4 % 8, N - 1)
    begin = la // 32 % NW * KW
    lane = la % 4
    wp = w + (n * (K // P) + begin // P + lane * 8)[:, None] + r8
    token = lb // (32 * NW) * 8 + lb // 4 % 8
    xp = x + ((token * groups + group) * K + lb // 32 % NW * KW + lb % 4 * (8 * P))[:, None] + r8
    there = (token < rows)[:, None] & (r8 >= 0)
    acc = tl.zeros((BN, BM) if NW == 1 else (NW, BN, BM), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    args = (xp, there, s, n, begin, lane)
    if AHEAD:
        now = weight_words(wp, 0, STEPS, 32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if AHEAD:
        for c in tl.range(0, chunks - 1, num_stages=1):
            ahead = weight_words(wp, c + 1, STEPS, 32)
            acc = _chunk(acc, now, c, *args, K, FORMAT, BLOCK_N, BLOCK_K, BN, BM, NW, STEPS, ASM)
            now = ahead
        acc = _chunk(acc, now, chunks - 1, *args, K, FORMAT, BLOCK_N, BLOCK_K, BN, BM, NW, STEPS, ASM)
    else:
        for c in tl.range(0, chunks, num_stages=1):
            now = weight_words(wp, c, STEPS, 32)
            acc = _chunk(acc, now, c, *args, K, FORMAT, BLOCK_N, BLOCK_K, BN, BM, NW, STEPS, ASM)
    if NW > 1:
        acc = tl.sum(acc, 0)
    if FORMAT == 8:
        acc = acc * 65536.0
    if FORMAT == 4:
        acc = acc * 4294967296.0
    return acc


@triton.jit(do_not_specialize=["rows", "N", "K", "GROUP"])
def few_rows(
    x, w, s, addend, bias, out, rows, N, K, GROUP,
    FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ADDEND: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, NW: tl.constexpr, STEPS: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
) -> None:  # fmt: skip
    """out [rows, N] = x Wᵀ for at most BM rows; one program a BN weight rows, its NW warps apart along the sum.

    x [rows, N / GROUP, K]: weight row n reads group n // GROUP. FORMAT 8: e4m3 with e8m0 scales of BLOCK_N x BLOCK_K,
    16: bf16. K is a multiple of NW * STEPS * (64 or 32).
    """
    first = tl.program_id(0) * BN
    acc = _few_sums(
        *(x, w, s, rows, first, N, K, first // GROUP, N // GROUP),
        *(FORMAT, BLOCK_N, BLOCK_K, BN, BM, NW, STEPS, AHEAD, PDL, ASM),
    )
    no = first + tl.arange(0, BN)
    t = tl.arange(0, BM)
    kept = (t < rows)[None, :] & (no < N)[:, None]
    place = t[None, :] * N + no[:, None]
    if LARGEST:  # `addend` says which outputs to leave out, `out` [rows, programs] gets a key each
        left = tl.load(addend + no, mask=no < N, other=1)
        acc = tl.where((left != 0)[:, None], float("-inf"), acc)
        keys = tl.where((no < N)[:, None], _key(acc, no[:, None]), LOWEST)
        tl.store(out + t * tl.num_programs(0) + tl.program_id(0), tl.max(keys, 0), mask=t < rows)
    else:
        if BIAS:
            acc += tl.load(bias + no, mask=no < N, other=0.0).to(tl.float32)[:, None]
        if ADDEND:
            acc += tl.load(addend + place, mask=kept, other=0.0)
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _store_map(out, values, first, rows, N, n1, n2, n3) -> None:
    """values [BN, BM] of the maps of a stack that end before n1, n2, n3 and N, each with [rows, its outputs] of out."""
    start = tl.where(first >= n1, n1, 0)
    end = tl.where(first >= n1, n2, n1)
    start = tl.where(first >= n2, n2, start)
    end = tl.where(first >= n2, n3, end)
    start = tl.where(first >= n3, n3, start)
    end = tl.where(first >= n3, N, end)
    n = first - start + tl.arange(0, values.shape[0])
    t = tl.arange(0, values.shape[1])
    place = start * rows + t[None, :] * (end - start) + n[:, None]
    tl.store(out + place, values.to(out.dtype.element_ty), mask=(t < rows)[None, :] & (n >= 0)[:, None])


@triton.jit(
    do_not_specialize=["rows", "K", "N0", "a1", "a2", "a3", "N1", "b1", "b2", "b3", "N2", "c1", "c2", "c3"],
)
def few_rows_merged(
    x0, w0, s0, out0, x1, w1, out1, w2, out2, rows, K, N0, a1, a2, a3, N1, b1, b2, b3, N2, c1, c2, c3,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, NW: tl.constexpr,
    STEPS_8: tl.constexpr, STEPS_16: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
) -> None:  # fmt: skip
    """`few_rows` for up to three stacks of maps of one input: N0 rows of FP8 weights (x0 is the input as they want it),
    N1 and N2 of bf16 ones. Sums are those of `few_rows`.
    """
    program = tl.program_id(0)
    first = program * BN
    if first < N0:
        acc = _few_sums(
            *(x0, w0, s0, rows, first, N0, K, 0, 1),
            *(8, BLOCK_N, BLOCK_K, BN, BM, NW, STEPS_8, AHEAD, PDL, ASM),
        )
        _store_map(out0, acc, first, rows, N0, a1, a2, a3)
    elif first < N0 + N1:
        acc = _few_sums(
            *(x1, w1, s0, rows, first - N0, N1, K, 0, 1), *(16, 1, 1, BN, BM, NW, STEPS_16, AHEAD, PDL, ASM)
        )
        _store_map(out1, acc, first - N0, rows, N1, b1, b2, b3)
    else:
        acc = _few_sums(
            *(x1, w2, s0, rows, first - N0 - N1, N2, K, 0, 1), *(16, 1, 1, BN, BM, NW, STEPS_16, AHEAD, PDL, ASM)
        )
        _store_map(out2, acc, first - N0 - N1, rows, N2, c1, c2, c3)


@triton.jit
def largest_of_rows(y, skip, keys, N: tl.constexpr, SIZE: tl.constexpr) -> None:
    """The key of SIZE outputs of a row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    left = tl.load(skip + n, mask=n < N, other=1)
    v = tl.where(left != 0, float("-inf"), tl.load(y + row * N + n, mask=n < N, other=0.0))
    key = tl.where(n < N, _key(v, n), LOWEST)
    tl.store(keys + row * tl.num_programs(1) + tl.program_id(1), tl.max(key, 0))


@triton.jit
def largest_of_keys(keys, places, values, P: tl.constexpr, SIZE: tl.constexpr) -> None:
    """Place and value of the largest of a row's P keys."""
    row = tl.program_id(0)
    best = tl.full((SIZE,), LOWEST, tl.int64)
    for first in tl.range(0, P, SIZE):
        p = first + tl.arange(0, SIZE)
        best = tl.maximum(best, tl.load(keys + row * P + p, mask=p < P, other=LOWEST))
    key = tl.max(best, 0)
    high = (key >> 32).to(tl.int32)
    tl.store(places + row, 0x7FFFFFFF - (key & 0x7FFFFFFF))
    tl.store(values + row, (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["rows", "N", "K", "GROUP", "n1", "n2", "n3"])
def many_rows(
    x, w, s, addend, bias, out, rows, N, K, GROUP, n1, n2, n3,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ADDEND: tl.constexpr, BIAS: tl.constexpr, MERGED: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, NW: tl.constexpr, NS: tl.constexpr, U: tl.constexpr, ASM: tl.constexpr,
) -> None:  # fmt: skip
    """The same for FP8 weights and tiles of BM weight rows times BT tokens; x comes from `round_rows` with ORDER 80.

    MERGED: outputs as `_store_map` places them, maps begin at n1, n2 and n3.
    """
    N = N // 16 * 16  # said so that loads and stores are wide
    K = K // (64 * U) * (64 * U)
    pid = tl.program_id(0)
    tiles = tl.num_programs(0) // (N // BM)
    n0 = (pid // (8 * tiles) * 8 + pid % 8) * BM
    if N // BM % 8 != 0:
        n0 = pid // tiles * BM
    t0 = pid % (8 * tiles) // 8 * BT
    if N // BM % 8 != 0:
        t0 = pid % tiles * BT
    t = t0 + tl.arange(0, BT)
    k = tl.arange(0, 64)
    R: tl.constexpr = BM // (16 * NW)
    la = tl.arange(0, BM * 4)
    r8 = tl.arange(0, 8)[None, :]
    n = n0 + la // (64 * NW) * (16 * NW) + la // 32 % NW * 16 + la // (32 * NW) % 2 * 8 + la // 4 % 8
    wp = w + (n * (K // 2) + la % 4 * 8)[:, None] + r8
    sp = n // BLOCK_N * (K // BLOCK_K)
    xp = x + ((tl.minimum(t, rows - 1) * (N // GROUP) + n0 // GROUP) * K)[None, :] + k[:, None]
    acc = tl.zeros((BM, BT), tl.float32)
    for i in tl.range(0, K // (64 * U), num_stages=NS):
        for u in tl.static_range(U):
            c = i * U + u
            v = tl.load(wp + c * 32)
            pair = scale_pair(s, sp + (c * 64 + la % 4 * 16) // BLOCK_K, 104)[:, None]
            xt = tl.load(xp + c * 64)
            v0, v1 = decode_fp8(v, pair, ASM)
            v = tl.permute(tl.reshape(tl.join(v0, v1), (R, 2, NW, 8, 4, 2, 2, 2, 2)), (0, 2, 1, 3, 8, 5, 6, 4, 7))
            acc = tl.dot(tl.reshape(v, (BM, 64)).to(x.dtype.element_ty), xt, acc)
        acc = settled(acc, ASM)
    acc = acc * 65536.0
    no = n0 + tl.arange(0, BM)
    kept = (t < rows)[None, :] & (no >= 0)[:, None]
    place = t[None, :].to(tl.int64) * N + no[:, None]
    if MERGED:
        start = tl.where(n0 >= n1, n1, 0)
        end = tl.where(n0 >= n1, n2, n1)
        start = tl.where(n0 >= n2, n2, start)
        end = tl.where(n0 >= n2, n3, end)
        start = tl.where(n0 >= n3, n3, start) // 16 * 16
        end = tl.where(n0 >= n3, N, end) // 16 * 16
        place = start * rows + t[None, :].to(tl.int64) * (end - start) + (no - start)[:, None]
    if BIAS:
        acc += tl.load(bias + no).to(tl.float32)[:, None]
    if ADDEND:
        acc += tl.load(addend + place, mask=kept, other=0.0)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["K"])
def expand_fp8(
    w, s, out, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SIZE: tl.constexpr, ASM: tl.constexpr
) -> None:
    """E4m3 codes as bf16 numbers, 16 SIZE of them a program; rows of K (a multiple of 16) contiguous."""
    chunk = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    r8 = tl.arange(0, 8)[None, :]
    n, k = chunk // (K // 16), chunk % (K // 16) * 16
    chunk = chunk.to(tl.int64)
    pair = scale_pair(s, n // BLOCK_N * (K // BLOCK_K) + k // BLOCK_K, 120)[:, None]
    v0, v1 = decode_fp8(tl.load(w + chunk[:, None] * 8 + r8), pair, ASM)
    tl.store(out + chunk[:, None] * 16 + r8, v0.to(out.dtype.element_ty))
    tl.store(out + chunk[:, None] * 16 + 8 + r8, v1.to(out.dtype.element_ty))
