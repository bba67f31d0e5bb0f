"""The kernels behind `triton.py`; importing it needs Triton.

A program holds one query row, a group of its heads and a share of its keys. Window rows and compressed rows come in one
loop over tiles of keys; a tile is of either kind. Softmax is the usual online one, in powers of two, p relative to the
largest logit so far. Shares of one row are put together by a second kernel, which also adds the sink.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spyglass.ops.stored_kernel import decode_codes, fetch_codes

_VARYING = ("table_width", "pool_table_width", "topk_width", "splits", "window_tiles")


@triton.jit(do_not_specialize=_VARYING)
def attend_share(
    q_ptr: tl.tensor,
    window_ptr: tl.tensor,
    table_ptr: tl.tensor,
    seq_ptr: tl.tensor,
    lo_ptr: tl.tensor,
    hi_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    pool_table_ptr: tl.tensor,
    visible_ptr: tl.tensor,
    topk_indices_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_ptr: tl.tensor,
    scale: tl.float32,
    table_width: tl.int32,
    pool_table_width: tl.int32,
    topk_width: tl.int32,
    splits: tl.int32,
    window_tiles: tl.int32,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    WINDOW_PAGE: tl.constexpr,
    POOL_PAGE: tl.constexpr,
    TOPK: tl.constexpr,
    WINDOW_ROW: tl.constexpr,
    POOL_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    ONE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """With SPLIT the un-normed sum, the largest logit and the sum of p of each head go to `out` and `part`, else the
    finished row to `out`. POOL_PAGE 0: no compressed rows. WINDOW_ROW, POOL_ROW: `stored.row_code` of either. TURNED:
    channels that are rotated, 0 = q comes rotated and the output stays so. NORM of q before: 0 none, 1 in fp32, 2
    stepwise (see `rms_norm`). ONE: a share is one tile, the first `window_tiles` of them of the window; the keys are on
    their way before q is made ready."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    program = tl.program_id(0)
    head = program % GROUPS * HEADS + tl.arange(0, HEADS)
    program = program // GROUPS
    share = 0
    if SPLIT:
        share = program % splits
        program = program // splits
    row = program.to(tl.int64)
    seq = tl.maximum(tl.load(seq_ptr + row), 0).to(tl.int64)
    lo = tl.load(lo_ptr + row)
    num_window = tl.maximum(tl.load(hi_ptr + row) - lo + 1, 0)
    lo = tl.maximum(lo, 0)
    table_ptr += seq * table_width
    ring = lo // WINDOW_PAGE % table_width - lo // WINDOW_PAGE
    if not ONE:
        window_tiles = (num_window + KEYS - 1) // KEYS
    tiles = window_tiles
    visible = 0
    if POOL_PAGE > 0:
        visible = tl.load(visible_ptr + row)
        pool_table_ptr += seq * pool_table_width
        topk_indices_ptr += row * topk_width
        listed = visible
        if TOPK:
            listed = tl.where(visible > 0, topk_width, 0)
        tiles += (listed + KEYS - 1) // KEYS
    first, last = 0, tiles
    if SPLIT:
        first, last = share * tiles // splits, (share + 1) * tiles // splits

    channel = tl.arange(0, DIM)
    there = head < NUM_HEADS
    window = (lo, num_window, window_tiles, ring, table_ptr, table_width, window_ptr)
    pool = (pool_table_ptr, topk_indices_ptr, topk_width, visible, pool_ptr)
    if ONE:
        keys, ok = _tile(share, window, pool, q_ptr, DIM, WINDOW_PAGE, POOL_PAGE, TOPK, WINDOW_ROW, POOL_ROW, KEYS)
    q = tl.load(q_ptr + (row * NUM_HEADS + head)[:, None] * DIM + channel[None, :], mask=there[:, None], other=0.0)
    if NORM > 0:
        q = _norm(q, NORM, EPS, DIM)
    if TURNED > 0:
        cos, sin = _tables(cos_ptr, sin_ptr, row, TURNED, DIM)
        q = _turn(q.to(tl.float32), cos, sin, HEADS, DIM).to(q_ptr.dtype.element_ty)

    top = tl.full([HEADS], -1e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, DIM], tl.float32)
    if ONE:
        keys = _numbers(keys, q_ptr, DIM, WINDOW_ROW, POOL_ROW, KEYS)
        top, total, mixed = _step(q, keys, ok, top, total, mixed, scale)
    else:
        for tile in tl.range(first, last, num_stages=STAGES):
            keys, ok = _tile(tile, window, pool, q_ptr, DIM, WINDOW_PAGE, POOL_PAGE, TOPK, WINDOW_ROW, POOL_ROW, KEYS)
            keys = _numbers(keys, q_ptr, DIM, WINDOW_ROW, POOL_ROW, KEYS)
            top, total, mixed = _step(q, keys, ok, top, total, mixed, scale)

    if SPLIT:
        at = (row * splits + share) * NUM_HEADS + head
        tl.store(part_ptr + at * 2, top, mask=there)
        tl.store(part_ptr + at * 2 + 1, total, mask=there)
        # nothing was seen: nobody reads the sum
        some = there & (total > 0)
        tl.store(out_ptr + at[:, None] * DIM + channel[None, :], mixed, mask=some[:, None])
    else:
        sink = tl.load(sink_ptr + head, mask=there, other=0.0) * 1.4426950408889634
        higher = tl.maximum(top, sink)
        kept = tl.exp2(top - higher)
        factor = kept / (total * kept + tl.exp2(sink - higher))
        out = (mixed * factor[:, None]).to(out_ptr.dtype.element_ty)
        if TURNED > 0:
            cos, sin = _tables(cos_ptr, sin_ptr, row, TURNED, DIM)
            out = _turn(out.to(tl.float32), cos, -sin, HEADS, DIM).to(out_ptr.dtype.element_ty)
        to = out_ptr + (row * NUM_HEADS + head)[:, None] * DIM + channel[None, :]
        tl.store(to, out, mask=there[:, None])


@triton.jit
def combine_shares(
    shares_ptr: tl.tensor,
    part_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row and head from its SPLITS <= PADDED shares."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    row = (program // NUM_HEADS).to(tl.int64)
    head = program % NUM_HEADS
    channel = tl.arange(0, DIM)
    share = tl.arange(0, PADDED)
    sink = tl.load(sink_ptr + head) * 1.4426950408889634
    if TURNED > 0:
        cos, sin = _tables(cos_ptr, sin_ptr, row, TURNED, DIM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    first = row * SPLITS * NUM_HEADS + head
    top_S = tl.load(part_ptr + (first + share * NUM_HEADS) * 2, mask=share < SPLITS, other=-1e30)
    total_S = tl.load(part_ptr + (first + share * NUM_HEADS) * 2 + 1, mask=share < SPLITS, other=0.0)
    higher = tl.maximum(tl.max(top_S, 0), sink)
    total = tl.sum(total_S * tl.exp2(top_S - higher), 0) + tl.exp2(sink - higher)
    mixed = tl.zeros([DIM], tl.float32)
    for s in tl.static_range(SPLITS):
        at = first + s * NUM_HEADS
        top = tl.load(part_ptr + at * 2)
        some = tl.load(part_ptr + at * 2 + 1) > 0
        part = tl.load(shares_ptr + at * DIM + channel, mask=channel < tl.where(some, DIM, 0), other=0.0)
        mixed += part * tl.exp2(top - higher)
    out = (mixed / total).to(out_ptr.dtype.element_ty)
    if TURNED > 0:
        a, b = tl.split(tl.reshape(out.to(tl.float32), (DIM // 2, 2)))
        out = tl.reshape(tl.join(a * cos + b * sin, b * cos - a * sin), (DIM,)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * NUM_HEADS + head) * DIM + channel, out)


@triton.jit
def _tile(
    tile: tl.tensor,
    window: tl.tensor,
    pool: tl.tensor,
    q_ptr: tl.tensor,
    DIM: tl.constexpr,
    WINDOW_PAGE: tl.constexpr,
    POOL_PAGE: tl.constexpr,
    TOPK: tl.constexpr,
    WINDOW_ROW: tl.constexpr,
    POOL_ROW: tl.constexpr,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The keys of a tile, zeros where there are none, and which there are; `_numbers` makes numbers of the former."""
    lo, num_window, window_tiles, ring, table_ptr, table_width, window_ptr = window
    pool_table_ptr, topk_indices_ptr, topk_width, visible, pool_ptr = pool
    n = tile * KEYS + tl.arange(0, KEYS)
    position = lo + n
    ok = n < tl.where(tile < window_tiles, num_window, 0)
    slot = position // WINDOW_PAGE + ring
    slot = tl.where(slot >= table_width, slot - table_width, slot)
    page = tl.load(table_ptr + slot, mask=ok, other=0).to(tl.int64)
    at = page * WINDOW_PAGE + position % WINDOW_PAGE
    keys_ptr = window_ptr
    if POOL_PAGE > 0:
        entry = n - window_tiles * KEYS
        if TOPK:
            entry = tl.load(topk_indices_ptr + entry, mask=(entry >= 0) & (entry < topk_width), other=-1)
        chosen = (entry >= 0) & (entry < visible)
        page = tl.load(pool_table_ptr + entry // POOL_PAGE, mask=chosen, other=0).to(tl.int64)
        at = tl.where(tile < window_tiles, at, page * POOL_PAGE + entry % POOL_PAGE)
        ok = ok | chosen
        keys_ptr = tl.where(tile < window_tiles, window_ptr, pool_ptr)
    if WINDOW_ROW != POOL_ROW:
        if tile < window_tiles:
            keys = _read(window_ptr, at, ok, WINDOW_ROW, KEYS, DIM, q_ptr.dtype.element_ty)
        else:
            keys = _read(pool_ptr, at, ok, POOL_ROW, KEYS, DIM, q_ptr.dtype.element_ty)
    elif WINDOW_ROW > 0:
        keys = fetch_codes(keys_ptr, at, ok, WINDOW_ROW, KEYS, DIM)
    else:
        keys = _read(keys_ptr, at, ok, 0, KEYS, DIM, q_ptr.dtype.element_ty)
    return keys, ok


@triton.jit
def _numbers(
    keys: tl.tensor,
    q_ptr: tl.tensor,
    DIM: tl.constexpr,
    WINDOW_ROW: tl.constexpr,
    POOL_ROW: tl.constexpr,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """Keys of `_tile` in q's dtype; codes of one kind are decoded only here, since more can be asked for before."""
    if (WINDOW_ROW == POOL_ROW) and (WINDOW_ROW > 0):
        return decode_codes(keys, WINDOW_ROW, KEYS, DIM, q_ptr.dtype.element_ty)
    else:
        return keys


@triton.jit
def _read(
    rows_ptr: tl.tensor,
    at: tl.tensor,
    ok: tl.tensor,
    ROW: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Rows `at` of pages as numbers."""
    if ROW > 0:
        return decode_codes(fetch_codes(rows_ptr, at, ok, ROW, KEYS, DIM), ROW, KEYS, DIM, DTYPE)
    else:
        return tl.load(rows_ptr + (at * DIM)[:, None] + tl.arange(0, DIM)[None, :], mask=ok[:, None], other=0.0)


@triton.jit
def _step(
    q: tl.tensor,
    keys: tl.tensor,
    ok: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    scale: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The online softmax goes on with one tile."""
    logit = tl.dot(q, tl.trans(keys), input_precision="ieee")
    logit = tl.where(ok[None, :], logit * scale, float("-inf"))
    higher = tl.maximum(top, tl.max(logit, 1))
    weight = tl.exp2(logit - higher[:, None])
    kept = tl.exp2(top - higher)
    mixed = tl.dot(weight.to(keys.dtype), keys, mixed * kept[:, None], input_precision="ieee")
    return higher, total * kept + tl.sum(weight, 1), mixed


@triton.jit
def _norm(q: tl.tensor, NORM: tl.constexpr, EPS: tl.constexpr, DIM: tl.constexpr) -> tl.tensor:
    """`rms_norm` without weight of the rows of q: in fp32, or rounding after every operation."""
    x = q.to(tl.float32)
    if NORM == 2:
        mean = tl.sum((x * x).to(q.dtype).to(tl.float32), 1) / DIM
        mean = (mean.to(q.dtype).to(tl.float32) + EPS).to(q.dtype).to(tl.float32)
        return (x * tl.rsqrt(mean).to(q.dtype).to(tl.float32)[:, None]).to(q.dtype)
    return (x * tl.rsqrt(tl.sum(x * x, 1) / DIM + EPS)[:, None]).to(q.dtype)


@triton.jit
def _tables(
    cos_ptr: tl.tensor, sin_ptr: tl.tensor, row: tl.tensor, TURNED: tl.constexpr, DIM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Cosines and sines for all pairs of channels; the leading ones stay as they are."""
    pair = tl.arange(0, DIM // 2) - (DIM - TURNED) // 2
    cos = tl.load(cos_ptr + row * (TURNED // 2) + pair, mask=pair >= 0, other=1.0)
    sin = tl.load(sin_ptr + row * (TURNED // 2) + pair, mask=pair >= 0, other=0.0)
    return cos, sin


@triton.jit
def _turn(x: tl.tensor, cos: tl.tensor, sin: tl.tensor, HEADS: tl.constexpr, DIM: tl.constexpr) -> tl.tensor:
    """`rope_partial` of rows x with tables of all pairs."""
    a, b = tl.split(tl.reshape(x, (HEADS, DIM // 2, 2)))
    c, s = cos[None, :], sin[None, :]
    return tl.reshape(tl.join(a * c - b * s, b * c + a * s), (HEADS, DIM))
