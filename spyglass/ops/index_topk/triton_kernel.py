"""The kernels behind `triton.py` (and `index_blocks/triton.py`); importing it needs Triton.

`score_entries` writes the scores of the visible entries, or of the listed candidates, to scratch, and the best score of
every group of neighbours. `select_entries` finds the k-th best score of a row through histograms of the digits of an
integer that orders like it, and lists what lies above it, and the first of what equals it, in order. Of a long row it
first chooses the groups that can hold what it looks for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spyglass.ops.overlap import begin
from spyglass.ops.stored_kernel import decode_codes, fetch_codes

# Two neighbours at once: round the dot products to bf16, drop negative ones, multiply by the weights with one rounding
# (-0 added), widen. As instructions of their own the conversions take four times as long.
_ROUNDED_PRODUCTS = tl.constexpr("""{
    .reg .b32 pair, zero;
    cvt.rn.relu.bf16x2.f32 pair, $3, $2;
    mov.b32 zero, 0x80008000;
    fma.rn.bf16x2 pair, pair, $4, zero;
    shl.b32 $0, pair, 16;
    and.b32 $1, pair, 0xffff0000;
}""")


@triton.jit(do_not_specialize=("rows", "table_width", "block_width", "score_stride", "group_stride", "few", "shares"))
def score_entries(
    q_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    table_ptr: tl.tensor,
    seq_ptr: tl.tensor,
    visible_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    weight_scale: tl.float32,
    rows: tl.int32,
    table_width: tl.int32,
    block_width: tl.int32,
    score_stride: tl.int32,
    group_stride: tl.int32,
    few: tl.int32,
    shares: tl.int32,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SCORES: tl.constexpr,
    STEPWISE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """ROWS rows a program, which share keys where they are of one sequence. Rows that see `few` entries or fewer have
    none written. ROW: `stored.row_code` of keys. BLOCK > 0: entries of the listed blocks of that size, numbered as
    listed. SCORES: write them all; GROUP > 0: write the best of every GROUP neighbours. What is not there scores
    -inf."""
    begin(OVERLAPS)
    program = tl.program_id(0)
    share = program % shares
    row = program // shares * ROWS + tl.arange(0, ROWS)
    first = program // shares * ROWS
    in_step = row < rows
    visible_R = tl.load(visible_ptr + row, mask=in_step, other=0)
    visible_R = tl.where(visible_R > few, visible_R, 0)
    seq_R = tl.load(seq_ptr + row, mask=in_step, other=-1)

    head = tl.arange(0, ROWS * HEADS)
    of_row = first + head // HEADS
    there = (head % HEADS < NUM_HEADS) & (of_row < rows)
    place = of_row.to(tl.int64) * NUM_HEADS + head % HEADS
    channel = tl.arange(0, DIMS)
    q = tl.load(
        q_ptr + place[:, None] * DIM + channel[None, :], mask=there[:, None] & (channel < DIM)[None, :], other=0.0
    )
    weight = tl.load(weights_ptr + place, mask=there, other=0.0).to(tl.float32) * weight_scale
    rounded_weight = weight.to(weights_ptr.dtype.element_ty)
    weight = rounded_weight.to(tl.float32)

    for part in range(ROWS):
        seq = tl.load(seq_ptr + tl.minimum(first + part, rows - 1))
        before = tl.load(seq_ptr + tl.maximum(first + part - 1, 0))
        mine_R = (seq_R == seq) & in_step
        longest = tl.max(tl.where(mine_R, visible_R, 0), 0)
        if ((part == 0) | (seq != before)) & (longest > 0) & (first + part < rows):
            pages_ptr = table_ptr + tl.maximum(seq, 0).to(tl.int64) * table_width
            limit = longest
            if BLOCK > 0:
                limit = block_width * BLOCK
            for tile in tl.range(share, (limit + KEYS - 1) // KEYS, shares, num_stages=STAGES):
                c = tile * KEYS + tl.arange(0, KEYS)
                entry = c
                if BLOCK > 0:
                    block = tl.load(
                        blocks_ptr + first.to(tl.int64) * block_width + c // BLOCK, mask=c < limit, other=-1
                    )
                    entry = tl.where(block < 0, -1, block * BLOCK + c % BLOCK)
                ok = (entry >= 0) & (entry < longest)
                page = tl.load(pages_ptr + entry // PAGE, mask=ok, other=0).to(tl.int64)
                at = page * PAGE + entry % PAGE
                if ROW > 0:
                    keys = fetch_codes(keys_ptr, at, ok, ROW, KEYS, DIM)
                    keys = decode_codes(keys, ROW, KEYS, DIM, q_ptr.dtype.element_ty)
                else:
                    keys = tl.load(
                        keys_ptr + (at * DIM)[:, None] + channel[None, :],
                        mask=ok[:, None] & (channel < DIM)[None, :],
                        other=0.0,
                    )
                dots = tl.dot(keys, tl.trans(q), input_precision="ieee")
                if STEPWISE and q_ptr.dtype.element_ty == tl.bfloat16:
                    dots = tl.inline_asm_elementwise(
                        _ROUNDED_PRODUCTS,
                        "=r,=r,r,r,r",
                        [dots, rounded_weight[None, :]],
                        dtype=tl.float32,
                        is_pure=True,
                        pack=2,
                    )
                else:
                    if STEPWISE:
                        dots = dots.to(q_ptr.dtype.element_ty).to(tl.float32)
                    dots = tl.maximum(dots, 0.0) * weight[None, :]
                    if STEPWISE:
                        dots = dots.to(q_ptr.dtype.element_ty).to(tl.float32)
                score = tl.sum(tl.reshape(dots, (KEYS, ROWS, HEADS)), 2)
                if STEPWISE:
                    score = score.to(q_ptr.dtype.element_ty).to(tl.float32)
                score = tl.where(ok[:, None] & (entry[:, None] < visible_R[None, :]), score, float("-inf"))
                if SCORES:
                    to = scores_ptr + row.to(tl.int64)[None, :] * score_stride + c[:, None]
                    tl.store(to, score.to(scores_ptr.dtype.element_ty), mask=(c < limit)[:, None] & mine_R[None, :])
                if GROUP > 0:
                    best = tl.max(tl.reshape(score, (KEYS // GROUP, GROUP, ROWS)), 1)
                    g = tile * (KEYS // GROUP) + tl.arange(0, KEYS // GROUP)
                    to = groups_ptr + row.to(tl.int64)[None, :] * group_stride + g[:, None]
                    mask = (g * GROUP < limit)[:, None] & mine_R[None, :]
                    tl.store(to, best.to(groups_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("block_width", "score_stride", "group_stride", "k", "width"))
def select_entries(
    scores_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    visible_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    spare_ptr: tl.tensor,
    topk_indices_ptr: tl.tensor,
    block_width: tl.int32,
    score_stride: tl.int32,
    group_stride: tl.int32,
    k: tl.int32,
    width: tl.int32,
    UNIT: tl.constexpr,
    PINNED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
    SPARE: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """The k best of a row, `width` numbers. UNIT entries make one candidate; PINNED: the newest is always listed.

    BLOCK > 0: numbers are places in the list of blocks of that size. Rows up to SHORT are read
    at once, others in parts of LONG. GROUP > 0: of a longer row the best of every GROUP candidates stand in `groups`,
    and `spare` [rows, SPARE] int32 is there to write to, SPARE >= 2 k.
    """
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    visible = tl.load(visible_ptr + row)
    limit = (visible + UNIT - 1) // UNIT
    scores_ptr += row * score_stride
    blocks_ptr += row * block_width
    topk_indices_ptr += row * width
    few = limit <= k
    pinned = -1
    if BLOCK > 0:
        limit = tl.where(visible > 0, block_width * BLOCK, 0)
        few = limit < 0
    if PINNED:
        pinned = limit - 1
    if few:
        for at in range(0, width, SHORT):
            i = at + tl.arange(0, SHORT)
            tl.store(topk_indices_ptr + i, tl.where(i < limit, i, -1), mask=i < width)
    else:
        groups_ptr += row * group_stride
        spare_ptr += row * SPARE
        if limit <= SHORT:
            listed = _choose(
                scores_ptr, spare_ptr, blocks_ptr, topk_indices_ptr, limit, limit, pinned, k, 0, BLOCK, BITS, SHORT, 0
            )
        else:
            if GROUP == 0:
                listed = _choose(
                    scores_ptr,
                    spare_ptr,
                    blocks_ptr,
                    topk_indices_ptr,
                    limit,
                    limit,
                    pinned,
                    k,
                    0,
                    BLOCK,
                    BITS,
                    LONG,
                    0,
                )
            else:
                # what is better than the k-th best group lies in fewer than k groups; of what equals it the first k
                # candidates will do, and every group whose best equals it has one
                groups = (limit + GROUP - 1) // GROUP
                groups = _choose(
                    groups_ptr, spare_ptr, blocks_ptr, spare_ptr, groups, groups, -1, k, k, 0, BITS, LONG, 0
                )
                tl.debug_barrier()
                listed = _choose(
                    scores_ptr,
                    spare_ptr,
                    blocks_ptr,
                    topk_indices_ptr,
                    groups * GROUP,
                    limit,
                    -1,
                    k,
                    0,
                    BLOCK,
                    BITS,
                    LONG,
                    GROUP,
                )
        for at in range(0, width, SHORT):
            i = at + tl.arange(0, SHORT)
            tl.store(topk_indices_ptr + i, tl.full([SHORT], -1, tl.int32), mask=(i >= listed) & (i < width))


@triton.jit
def _choose(
    scores_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    topk_indices_ptr: tl.tensor,
    limit: tl.tensor,
    total: tl.tensor,
    pinned: tl.tensor,
    k: tl.tensor,
    spare: tl.tensor,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Write the k best of `limit` candidates, SIZE at a time, in order; returns how many there are.

    GROUP > 0: candidates are those of the listed groups, as far as they lie below `total`. `spare` > 0: of those that
    equal the k-th best so many are written, not only as many as belong to the k best.
    """
    bar, above = _threshold(scores_ptr, groups_ptr, limit, total, pinned, k, BITS, SIZE, GROUP)
    quota = tl.where(bar > 0, tl.maximum(k - above, spare), 0)  # absent candidates equal a bar of 0
    num_better = 0
    num_equal = 0
    for at in range(0, limit, SIZE):
        number, key = _candidates(scores_ptr, groups_ptr, at, limit, total, pinned, BITS, SIZE, GROUP)
        better = key > bar
        equal = key == bar
        both = tl.cumsum(better.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
        better_to_here = (both & 0xFFFF) + num_better
        equal_to_here = (both >> 16) + num_equal
        taken = better | (equal & (equal_to_here <= quota))
        if BLOCK > 0:
            number = tl.load(blocks_ptr + number // BLOCK, mask=taken, other=0) * BLOCK + number % BLOCK
        tl.store(topk_indices_ptr + better_to_here + tl.minimum(equal_to_here, quota) - 1, number, mask=taken)
        num_better = tl.max(better_to_here, 0)
        num_equal = tl.max(equal_to_here, 0)
    return num_better + tl.minimum(num_equal, quota)


@triton.jit
def _candidates(
    scores_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    at: tl.tensor,
    limit: tl.tensor,
    total: tl.tensor,
    pinned: tl.tensor,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Numbers and keys of SIZE candidates from `at` on; the key of one that is not there is 0."""
    number = at + tl.arange(0, SIZE)
    there = number < limit
    if GROUP > 0:
        number = tl.load(groups_ptr + number // GROUP, mask=there, other=0) * GROUP + number % GROUP
        there = there & (number < total)
    key = _key(tl.load(scores_ptr + number, mask=there, other=float("-inf")).to(tl.float32), BITS)
    return number, tl.where(number == pinned, tl.full([], (1 << BITS) - 1, tl.uint32), key)


@triton.jit
def _key(score: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """An integer that orders like the score, 0 for -inf; equal for both zeros. 16 bits suffice for bf16 values."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    if BITS == 16:
        key = key >> 16
    return tl.where(score == float("-inf"), tl.full([], 0, tl.uint32), key)


@triton.jit
def _threshold(
    scores_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    limit: tl.tensor,
    total: tl.tensor,
    pinned: tl.tensor,
    k: tl.tensor,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The k-th largest key, 0 where there are fewer than k, and how many are larger; eight bits at a time."""
    bar = tl.full([], 0, tl.uint32)
    above = tl.full([], 0, tl.int32)
    bins = tl.arange(0, 256)
    for level in tl.static_range(BITS // 8):
        counts = tl.zeros([256], tl.int32)
        for at in range(0, limit, SIZE):
            _, key = _candidates(scores_ptr, groups_ptr, at, limit, total, pinned, BITS, SIZE, GROUP)
            digit = (key >> (BITS - 8 * (level + 1))) & 255
            if level > 0:  # how many have digit 0 does not matter
                digit = tl.where(key >> (BITS - 8 * level) == bar, digit, tl.full([], 0, tl.uint32))
            counts += tl.histogram(digit.to(tl.int32), 256)
        reach = tl.cumsum(counts, 0, reverse=True) + above
        best = tl.max(tl.where(reach >= k, bins, 0), 0)
        above = tl.maximum(above, tl.max(tl.where(bins == best + 1, reach, 0), 0))
        bar = (bar << 8) | best.to(tl.uint32)
    return bar, above
