"""The kernels behind `triton.py`; importing it needs Triton.

A choice c = t K + k is one expert of one row. `few`: a program reads 16 weight rows of one expert once, for all (at
most BM) choices that want it. `many`: tensor-core tiles of weight rows times tokens. Outputs are kept per choice and
added in ascending order of experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spyglass.ops.experts_grouped.triton_adapters import bank_of, choice_of, expand
from spyglass.ops.linear_block.triton_decode import (
    add_fields,
    decode_fp4,
    decode_fp4_tiled,
    input_fields,
    power_pair,
    round_e4m3,
    scale_words,
    settled,
    weight_fields,
    weight_words,
)


@triton.jit(do_not_specialize=["choices", "rows"])
def begin_few(
    x, ids, rounded, counters, order, listed, block_expert, block_first, block_size, choices, rows,
    C: tl.constexpr, KC: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr,
    BLOCK: tl.constexpr, ORDER: tl.constexpr, SORT: tl.constexpr, SLICE: tl.constexpr, COUNTERS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Round 1,024 values of x a program; then, SLICE choices a program, what `few` needs to know of them.

    `order` [T, K]: a row's choices in ascending order of experts, -1 last. With SORT also `listed` (choices by expert)
    and blocks of at most BM of them. Counters of finished programs become 0.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    parts = tl.cdiv(rows * C, 1024)
    if pid < parts:
        place = pid * 1024 + tl.arange(0, 1024)
        v = tl.load(x + place, mask=place < rows * C, other=0.0).to(tl.float32)
        if BLOCK > 0:
            v = tl.reshape(v, (1024 // BLOCK, BLOCK))
            v = tl.reshape(round_e4m3(v, tl.max(tl.abs(v), 1)[:, None]), (1024,))
        k = place
        if ORDER == 4:
            k = place // 32 * 32 + place % 4 * 8 + place % 32 // 4
        tl.store(rounded + k, v.to(rounded.dtype.element_ty), mask=place < rows * C)
    else:
        part = pid - parts
        zero = part * SLICE * COUNTERS + tl.arange(0, SLICE * COUNTERS)
        tl.store(counters + zero, tl.zeros((SLICE * COUNTERS,), tl.int32))
        c = tl.arange(0, CP)
        e = tl.load(ids + c, mask=c < choices, other=-1)
        key = tl.where(e >= 0, e, 1 << 30)
        ci = part * SLICE + tl.arange(0, SLICE)
        ei = tl.load(ids + ci, mask=ci < choices, other=-1)
        ki = tl.where(ei >= 0, ei, 1 << 30)
        before = (key[None, :] < ki[:, None]) | ((key[None, :] == ki[:, None]) & (c[None, :] < ci[:, None]))
        before = before & (c < choices)[None, :]
        own = tl.sum((before & (c[None, :] // KC == ci[:, None] // KC)).to(tl.int32), 1)
        tl.store(order + ci // KC * KC + own, tl.where(ei >= 0, ci, -1), mask=ci < choices)
        if SORT:
            tl.store(listed + tl.sum(before.to(tl.int32), 1), ci, mask=(ci < choices) & (ei >= 0))
            bins = tl.arange(0, EP)
            counts = tl.histogram(tl.where(e >= 0, e, 0), EP, mask=e >= 0)
            blocks = (counts + BM - 1) // BM
            ends = tl.cumsum(blocks, 0)
            firsts = tl.cumsum(counts, 0) - counts
            eb = tl.sum((ends[None, :] <= ci[:, None]).to(tl.int32), 1)
            hit = bins[None, :] == eb[:, None]
            within = (ci - tl.sum(tl.where(hit, (ends - blocks)[None, :], 0), 1)) * BM
            size = tl.minimum(tl.sum(tl.where(hit, counts[None, :], 0), 1) - within, BM)
            tl.store(block_expert + ci, tl.where(eb < E, eb, -1))
            tl.store(block_first + ci, tl.sum(tl.where(hit, firsts[None, :], 0), 1) + within)
            tl.store(block_size + ci, size)


@triton.jit
def _chunk(
    acc, bcc, ga, gb, c, xp, there, sga, sgb, n, begin, lane,
    K: tl.constexpr, UP: tl.constexpr, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, NW: tl.constexpr, STEPS: tl.constexpr, TILED: tl.constexpr, ASM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    P: tl.constexpr = 16 // FORMAT
    za = scale_words(sga, n, begin, lane, c, K, FORMAT, BLOCK_N, BLOCK_K, STEPS, TILED)
    if UP:
        zb = scale_words(sgb, n, begin, lane, c, K, FORMAT, BLOCK_N, BLOCK_K, STEPS, TILED)
    for j in tl.static_range(STEPS):
        shift = j * 8 if TILED else lane * 8
        inputs = input_fields(xp + (c * STEPS + j) * (32 * P), there, FORMAT, BM, NW)
        acc = add_fields(acc, weight_fields(ga[j], za[j], shift, FORMAT, TILED, ASM), inputs, P, BN, NW)
        if UP:
            bcc = add_fields(bcc, weight_fields(gb[j], zb[j], shift, FORMAT, TILED, ASM), inputs, P, BN, NW)
    return acc, bcc


@triton.jit(do_not_specialize=["choices", "rows", "num_adapters", "room"])
def few(
    x, wa, sa, wb, sb, weights, ids, listed, block_expert, block_first, block_size, counters, out, adapter_T, adapter_A,
    u, ra, starta, rb, startb, plain, choices, rows, num_adapters, room, limit,
    N: tl.constexpr, K: tl.constexpr, KC: tl.constexpr, UP: tl.constexpr, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ROUND: tl.constexpr, ORDER: tl.constexpr, SORT: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, NW: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr, TILED: tl.constexpr, CP: tl.constexpr,
    COUNTERS: tl.constexpr, E: tl.constexpr, A: tl.constexpr, B: tl.constexpr, SP: tl.constexpr, KEEP: tl.constexpr,
    PDL: tl.constexpr, ASM: tl.constexpr,
) -> None:  # fmt: skip
    """UP: h[c] = round(bf16(silu(min(g, limit)) clamp(u) w_c)), g and u by `wa` and `wb`; else y[c] = wa h[c].

    The last program of a block of ROUND channels of h rounds it and stores it in the order in which the next product
    reads it; `counters` [blocks, COUNTERS] says which is the last. A, B: adapters join g (or y), u.
    KEEP: `plain` gets h before it is rounded, in the order of its channels.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if SORT:
            tl.extra.cuda.gdc_wait()
    b = tl.program_id(1)
    P: tl.constexpr = 16 // FORMAT
    KW: tl.constexpr = K // NW
    CHUNKS: tl.constexpr = KW // (32 * P * STEPS)
    if SORT:
        expert = tl.load(block_expert + b)
        start = tl.load(block_first + b)
        size = tl.load(block_size + b)
        if expert < 0:
            return
    else:
        expert = tl.load(ids + b)
        start = 0
        size = 0
        c = tl.arange(0, CP)
        earlier = tl.load(ids + c, mask=c < b, other=-1) == expert
        if (expert < 0) | (tl.max(earlier.to(tl.int32), 0) > 0):
            if PDL:
                tl.extra.cuda.gdc_wait()
            return
    e = expert.to(tl.int64)
    la = tl.arange(0, BN * 4 * NW)
    lb = tl.arange(0, BM * 4 * NW)
    r8 = tl.arange(0, 8)[None, :]
    n = tl.program_id(0) * BN + la // (32 * NW) * 8 + la // 4 % 8
    begin = la // 32 % NW * KW
    lane = la % 4
    STRIDE: tl.constexpr = 512 if TILED else 32
    if TILED:
        place = n // 16 * (K * 4) + n % 16 * 32 + begin * 4
    else:
        place = n * (K // P) + begin // P
    at = e * (N * K // P) + (place + lane * 8)[:, None] + r8
    SCALES: tl.constexpr = N * K // 128 if FORMAT == 4 else N // BLOCK_N * (K // BLOCK_K) // 2 if FORMAT == 8 else 0
    sga = sa + e * SCALES
    sgb = sb + e * SCALES
    if AHEAD or CHUNKS == 1:
        ga = weight_words(wa + at, 0, STEPS, STRIDE)
        gb = ga
        if UP:
            gb = weight_words(wb + at, 0, STEPS, STRIDE)
    if PDL and not SORT:
        tl.extra.cuda.gdc_wait()
    slot = lb // (32 * NW) * 8 + lb // 4 % 8
    if UP and not SORT:
        row = tl.where(slot < rows, slot, -1)
    else:
        row = choice_of(ids, listed, start, size, slot, expert, rows, KC, SORT)
    there = (row >= 0)[:, None] & (r8 >= 0)
    if UP and SORT:
        row = row // KC
    xp = x + (row * K + lb // 32 % NW * KW + lb % 4 * (8 * P))[:, None] + r8
    acc = tl.zeros((BN, BM) if NW == 1 else (NW, BN, BM), tl.float32)
    bcc = acc
    args = (xp, there, sga, sgb, n, begin, lane)
    if AHEAD:
        for c in tl.range(0, CHUNKS - 1, num_stages=1):
            na = weight_words(wa + at, c + 1, STEPS, STRIDE)
            nb = na
            if UP:
                nb = weight_words(wb + at, c + 1, STEPS, STRIDE)
            acc, bcc = _chunk(
                acc, bcc, ga, gb, c, *args, K, UP, FORMAT, BLOCK_N, BLOCK_K, BN, BM, NW, STEPS, TILED, ASM
            )
            ga = na
            gb = nb
        last: tl.constexpr = CHUNKS - 1
        acc, bcc = _chunk(acc, bcc, ga, gb, last, *args, K, UP, FORMAT, BLOCK_N, BLOCK_K, BN, BM, NW, STEPS, TILED, ASM)
    elif CHUNKS == 1:
        acc, bcc = _chunk(acc, bcc, ga, gb, 0, *args, K, UP, FORMAT, BLOCK_N, BLOCK_K, BN, BM, NW, STEPS, TILED, ASM)
    else:
        for c in tl.range(0, CHUNKS, num_stages=1):
            ga = weight_words(wa + at, c, STEPS, STRIDE)
            gb = ga
            if UP:
                gb = weight_words(wb + at, c, STEPS, STRIDE)
            acc, bcc = _chunk(
                acc, bcc, ga, gb, c, *args, K, UP, FORMAT, BLOCK_N, BLOCK_K, BN, BM, NW, STEPS, TILED, ASM
            )
    if NW > 1:
        acc = tl.sum(acc, 0)
        bcc = tl.sum(bcc, 0)
    FACTOR: tl.constexpr = 4294967296.0 if FORMAT == 4 else 65536.0 if FORMAT == 8 else 1.0
    acc = acc * FACTOR
    no = tl.program_id(0) * BN + tl.arange(0, BN)
    choice = choice_of(ids, listed, start, size, tl.arange(0, BM), expert, rows, KC, SORT)
    kept = (choice >= 0)[None, :] & (no >= 0)[:, None]
    if A or B:
        bank = bank_of(adapter_T, adapter_A, choice, num_adapters, KC, SP)
    if A:
        acc = expand(acc, no, choice, bank, expert, u, ra, starta, room, N, E, 16)
    if UP:
        bcc = bcc * FACTOR
        if B:
            bcc = expand(bcc, no, choice, bank, expert, u + choices.to(tl.int64) * room, rb, startb, room, N, E, 16)
        w = tl.load(weights + choice, mask=choice >= 0, other=0.0)[None, :]
        gate = tl.minimum(acc.to(out.dtype.element_ty).to(tl.float32), limit)
        up = bcc.to(out.dtype.element_ty).to(tl.float32)
        acc = gate / (1.0 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -limit), limit) * w
    if UP and KEEP:
        tl.store(plain + choice[None, :] * N + no[:, None], acc.to(out.dtype.element_ty), mask=kept)
    to = no
    if UP and ROUND == 0 and ORDER == 4:
        to = no // 32 * 32 + no % 4 * 8 + no % 32 // 4
    tl.store(out + choice[None, :] * N + to[:, None], acc.to(out.dtype.element_ty), mask=kept)
    if UP and ROUND > 0:
        part = tl.program_id(0) * BN // ROUND
        if NW > 1:
            tl.debug_barrier()
        done = tl.atomic_add(counters + b * COUNTERS + part, 1, sem="acq_rel", scope="gpu")
        if done == ROUND // BN - 1:
            k = part * ROUND + tl.arange(0, ROUND)
            end = k
            if ORDER == 4:
                end = k // 32 * 32 + k % 4 * 8 + k % 32 // 4
            for first in tl.range(0, size if SORT else rows, NW):
                two = first + tl.arange(0, NW)
                mine = choice_of(ids, listed, start, size, two, expert, rows, KC, SORT)[:, None]
                held = (mine >= 0) & (k >= 0)[None, :]
                z = tl.load(out + mine * N + k[None, :], mask=held, other=0.0, cache_modifier=".cg").to(tl.float32)
                z = round_e4m3(z, tl.max(tl.abs(z), 1)[:, None])
                tl.debug_barrier()
                tl.store(out + mine * N + end[None, :], z.to(out.dtype.element_ty), mask=held)


@triton.jit
def combine(y, order, out, C: tl.constexpr, KC: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr) -> None:
    """out[t] = Σ_k y[order[t, k]] in fp32, in that order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    acc = tl.zeros((SIZE,), tl.float32)
    for k in tl.static_range(KC):
        c = tl.load(order + t * KC + k).to(tl.int64)
        acc += tl.load(y + c * C + n, mask=(n < C) & (c + n >= n), other=0.0).to(tl.float32)
    tl.store(out + t * C + n, acc, mask=n < C)


@triton.jit(do_not_specialize=["choices"])
def count_choices(ids, counts, choices, EP: tl.constexpr, SIZE: tl.constexpr) -> None:
    """counts[part, e] of the SIZE choices of a part."""
    c = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    e = tl.load(ids + c, mask=c < choices, other=-1)
    found = tl.histogram(tl.where(e >= 0, e, 0), EP, mask=e >= 0)
    tl.store(counts + tl.program_id(0) * EP + tl.arange(0, EP), found)


@triton.jit(do_not_specialize=["choices", "parts", "blocks"])
def begin_many(
    ids, counts, order, listed, block_expert, block_first, block_size, counters, choices, parts, blocks,
    KC: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, PP: tl.constexpr, BT: tl.constexpr, SIZE: tl.constexpr,
    COUNTERS: tl.constexpr,
) -> None:  # fmt: skip
    """`listed`, `order` and blocks as in `begin_few`, from the counts of all parts; a program lists its own part."""
    part = tl.program_id(0)
    bins = tl.arange(0, EP)
    rows = tl.arange(0, PP)
    before = tl.zeros((EP,), tl.int32)
    total = tl.zeros((EP,), tl.int32)
    for first in tl.range(0, parts, PP):
        p = first + rows
        found = tl.load(
            counts + p[:, None] * EP + bins[None, :], mask=(p < parts)[:, None] & (bins < E)[None, :], other=0
        )
        total += tl.sum(found, 0)
        before += tl.sum(tl.where((p < part)[:, None], found, 0), 0)
    starts = tl.cumsum(total, 0) - total
    c = part * SIZE + tl.arange(0, SIZE)
    e = tl.load(ids + c, mask=c < choices, other=-1)
    base = tl.gather(starts + before, tl.where(e >= 0, e, 0), 0)
    rank = tl.zeros((SIZE,), tl.int32)
    for i in tl.range(0, SIZE, 32):
        ci = part * SIZE + i + tl.arange(0, 32)
        ei = tl.load(ids + ci, mask=ci < choices, other=-2)
        rank += tl.sum(((ei[None, :] == e[:, None]) & (ci[None, :] < c[:, None])).to(tl.int32), 1)
    tl.store(listed + base + rank, c, mask=(c < choices) & (e >= 0))
    own = tl.zeros((SIZE,), tl.int32)
    key = tl.where(e >= 0, e, 1 << 30)
    for k in tl.static_range(KC):
        ck = c // KC * KC + k
        ek = tl.load(ids + ck, mask=ck < choices, other=-1)
        ek = tl.where(ek >= 0, ek, 1 << 30)
        own += ((ek < key) | ((ek == key) & (ck < c))).to(tl.int32)
    tl.store(order + c // KC * KC + own, tl.where(e >= 0, c, -1), mask=c < choices)
    per = (total + BT - 1) // BT
    ends = tl.cumsum(per, 0)
    for first in tl.range(part * 32, blocks, tl.num_programs(0) * 32):
        b = first + tl.arange(0, 32)
        eb = tl.sum((ends[None, :] <= b[:, None]).to(tl.int32), 1)
        hit = bins[None, :] == eb[:, None]
        within = (b - tl.sum(tl.where(hit, (ends - per)[None, :], 0), 1)) * BT
        size = tl.minimum(tl.sum(tl.where(hit, total[None, :], 0), 1) - within, BT)
        tl.store(block_expert + b, tl.where(eb < E, eb, -1), mask=b < blocks)
        tl.store(block_first + b, tl.sum(tl.where(hit, starts[None, :], 0), 1) + within, mask=b < blocks)
        tl.store(block_size + b, size, mask=b < blocks)
        if COUNTERS > 0:
            zero = first * COUNTERS + tl.arange(0, 32 * COUNTERS)
            tl.store(counters + zero, tl.zeros((32 * COUNTERS,), tl.int32), mask=zero < blocks * COUNTERS)


@triton.jit
def _tile(
    x, wp, sp, out, weights, listed, start, size, n0, expert, lane, limit, adapters: tl.tuple,
    N: tl.constexpr, K: tl.constexpr, KC: tl.constexpr, UP: tl.constexpr, E: tl.constexpr, A: tl.constexpr,
    B: tl.constexpr, SP: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, NW: tl.constexpr, NS: tl.constexpr,
    U: tl.constexpr, TILED: tl.constexpr, ASM: tl.constexpr,
) -> None:  # fmt: skip
    R: tl.constexpr = BM // (16 * NW)
    B2: tl.constexpr = BM // 2 if UP else BM
    slot = tl.arange(0, BT)
    choice = tl.load(listed + start + slot, mask=slot < size, other=-1)
    row = tl.maximum(choice, 0) // KC if UP else tl.maximum(choice, 0)
    xp = x + row.to(tl.int64)[None, :] * K + tl.arange(0, 128)[:, None]
    acc = tl.zeros((BM, BT), tl.float32)
    for i in tl.range(0, K // (128 * U), num_stages=NS):
        for u in tl.static_range(U):
            c = i * U + u
            xt = tl.load(xp + c * 128)
            if TILED:
                v = tl.load(wp + c * 512)
                scale = (tl.load(sp + c // 4 * 64) >> (c % 4 * 8)) & 255
                v0, v1, v2, v3 = decode_fp4_tiled(v, power_pair(scale, 94)[:, None], ASM)
            else:
                v = tl.load(wp + c * 32)
                scale = (tl.load(sp + c) >> (lane * 8)) & 255
                v0, v1, v2, v3 = decode_fp4(v, power_pair(scale, 94)[:, None], ASM)
            v = tl.join(tl.join(v0, v2), tl.join(v1, v3))
            v = tl.permute(tl.reshape(v, (R, 2, NW, 8, 4, 2, 2, 2, 2, 2)), (0, 2, 1, 3, 8, 9, 5, 6, 4, 7))
            acc = tl.dot(tl.reshape(v, (BM, 128)).to(xt.dtype), xt, acc)
        acc = settled(acc, ASM)
    acc = acc * 4294967296.0
    no = n0 + tl.arange(0, B2)
    if A or B:
        adapter_T, adapter_A, u, ra, starta, rb, startb, ub, num_adapters, room = adapters
        bank = bank_of(adapter_T, adapter_A, choice, num_adapters, KC, SP)
    if UP:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BM // 16, 2, 8, BT)), (0, 2, 3, 1)))
        gate = tl.reshape(gate, (B2, BT))
        up = tl.reshape(up, (B2, BT))
        if A:
            gate = expand(gate, no, choice, bank, expert, u, ra, starta, room, N, E, 16)
        if B:
            up = expand(up, no, choice, bank, expert, ub, rb, startb, room, N, E, 16)
        gate = tl.minimum(gate.to(out.dtype.element_ty).to(tl.float32), limit)
        up = up.to(out.dtype.element_ty).to(tl.float32)
        w = tl.load(weights + choice, mask=choice >= 0, other=0.0)[None, :]
        acc = gate / (1.0 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -limit), limit) * w
    elif A:
        acc = expand(acc, no, choice, bank, expert, u, ra, starta, room, N, E, 16)
    kept = (choice >= 0)[None, :] & (no >= 0)[:, None]
    tl.store(out + choice[None, :].to(tl.int64) * N + no[:, None], acc.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["choices", "num_adapters", "room"])
def many(
    x, wa, sa, wb, sb, weights, listed, block_expert, block_first, block_size, out, adapter_T, adapter_A, u, ra, starta,
    rb, startb, choices, num_adapters, room, limit,
    N: tl.constexpr, K: tl.constexpr, KC: tl.constexpr, UP: tl.constexpr, E: tl.constexpr, A: tl.constexpr,
    B: tl.constexpr, SP: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, NW: tl.constexpr, NS: tl.constexpr,
    U: tl.constexpr, TILED: tl.constexpr, ASM: tl.constexpr,
) -> None:  # fmt: skip
    """As `few`, FP4 weights, x in the order of `round_rows` with ORDER 40; h is not rounded here.

    UP: every 16 rows of a tile are 8 of `wa` and 8 of `wb`, so gate and up of an output lie in one thread. Blocks of at
    most BT choices; one that fills no more than half is computed as half.
    """
    b = tl.program_id(1)
    expert = tl.load(block_expert + b)
    if expert < 0:
        return
    start = tl.load(block_first + b)
    size = tl.load(block_size + b)
    e = expert.to(tl.int64)
    B2: tl.constexpr = BM // 2 if UP else BM
    n0 = tl.program_id(0) * B2
    la = tl.arange(0, BM * 4)
    r8 = tl.arange(0, 8)[None, :]
    lane = la % 4
    half = la // (32 * NW) % 2
    if UP:
        n = n0 + la // (64 * NW) * (8 * NW) + la // 32 % NW * 8 + la // 4 % 8
        wp = tl.where(half[:, None] == 0, wa, wb)
        sp = tl.where(half == 0, sa, sb)
    else:
        n = n0 + la // (64 * NW) * (16 * NW) + la // 32 % NW * 16 + half * 8 + la // 4 % 8
        wp = wa
        sp = sa
    if TILED:
        wp = wp + e * (N * K // 4) + (n // 16 * (K * 4) + n % 16 * 32 + lane * 8)[:, None] + r8
        sp = sp + e * (N * K // 128) + (n // 16 * (K // 8) + n % 16 * 4 + lane)
    else:
        wp = wp + e * (N * K // 4) + (n * (K // 4) + lane * 8)[:, None] + r8
        sp = sp + e * (N * K // 128) + n * (K // 128)
    ub = u + choices.to(tl.int64) * room
    adapters = (adapter_T, adapter_A, u, ra, starta, rb, startb, ub, num_adapters, room)
    args = (x, wp, sp, out, weights, listed, start, size, n0, expert, lane, limit, adapters)
    if size > BT // 2:
        _tile(*args, N, K, KC, UP, E, A, B, SP, BM, BT, NW, NS, U, TILED, ASM)
    else:
        _tile(*args, N, K, KC, UP, E, A, B, SP, BM, BT // 2, NW, NS, U, TILED, ASM)
