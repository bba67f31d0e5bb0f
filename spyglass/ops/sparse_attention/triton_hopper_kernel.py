"""The kernel of many rows on compute capability 9.0, in Gluon; importing it needs Triton.

Programs stay and take one piece of work (a row, or a share of a row's keys) after another. Warps have two jobs, tied
together by barriers in shared memory: `_weigh` gathers rows of q and tiles of keys, a tile ahead, and makes logits and
the online softmax; `_mix` adds weighted keys up and writes the result. So the keys of the next tile are on their way,
and its logits are made, while those of this one are added up. (Three jobs of 16 warps in all would leave 128 registers
to a thread, fewer than the sums of a row take.)

A tile of keys has a `full` barrier (keys there), a `weighed` barrier (weights there) and an `empty` one (used up).
"""

# ruff: noqa: RUF059 -- lists of arguments travel as tuples
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from spyglass.ops.stored_kernel import e2m1_value, e4m3_value, scale_value

# its name since Triton 3.8, and the one before
_to_shared = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.jit
def _span(
    work: gl.tensor,
    lists: gl.tensor,
    widths: gl.tensor,
    C: gl.constexpr,
) -> tuple[gl.tensor, ...]:
    """Of one piece of work: row, share, tiles [first, last) and how many of them have keys (one at least is made)."""
    KEYS: gl.constexpr = C[2]
    POOL_PAGE: gl.constexpr = C[4]
    TOPK: gl.constexpr = C[5]
    SPLIT: gl.constexpr = C[6]
    seq_ptr, lo_ptr, hi_ptr, visible_ptr, table_ptr, pool_table_ptr, topk_indices_ptr = lists
    splits, table_width, pool_table_width, topk_width = widths
    row = work
    share = 0
    if SPLIT:
        row = work // splits
        share = work % splits
    lo = gl.load(lo_ptr + row)
    num_window = gl.maximum(gl.load(hi_ptr + row) - lo + 1, 0)
    window_tiles = (num_window + KEYS - 1) // KEYS
    tiles = window_tiles
    visible = 0
    if POOL_PAGE > 0:
        visible = gl.load(visible_ptr + row)
        listed = visible
        if TOPK:
            listed = gl.where(visible > 0, topk_width, 0)
        tiles += (listed + KEYS - 1) // KEYS
    first = 0
    stop = tiles
    if SPLIT:
        first = share * tiles // splits
        stop = (share + 1) * tiles // splits
    return row, share, first, gl.maximum(stop, first + 1), stop, gl.maximum(lo, 0), num_window, window_tiles, visible


@gluon.jit
def _entries(
    tile: gl.tensor,
    stop: gl.tensor,
    row: gl.tensor,
    num_window: gl.tensor,
    window_tiles: gl.tensor,
    lists: gl.tensor,
    widths: gl.tensor,
    C: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Places of the keys of a tile in the window, -1 where there is none, and compressed rows, visible or not."""
    KEYS: gl.constexpr = C[2]
    POOL_PAGE: gl.constexpr = C[4]
    TOPK: gl.constexpr = C[5]
    seq_ptr, lo_ptr, hi_ptr, visible_ptr, table_ptr, pool_table_ptr, topk_indices_ptr = lists
    splits, table_width, pool_table_width, topk_width = widths
    n = tile * KEYS + gl.arange(0, KEYS, gl.BlockedLayout([1], [32], [4], [0]))
    entry = gl.where(tile < stop, n - window_tiles * KEYS, -1)
    place = gl.where(n < gl.where(tile < stop, num_window, 0), n, -1)
    if POOL_PAGE > 0 and TOPK:
        listed = (entry >= 0) & (entry < topk_width)
        entry = gl.load(topk_indices_ptr + row.to(gl.int64) * topk_width + entry, mask=listed, other=-1)
    return place, entry


@gluon.jit
def _rows(
    place: gl.tensor,
    entry: gl.tensor,
    seq: gl.tensor,
    lo: gl.tensor,
    visible: gl.tensor,
    lists: gl.tensor,
    widths: gl.tensor,
    C: gl.constexpr,
) -> gl.tensor:
    """The rows of the pages in which those keys lie, -1 where there is none."""
    WINDOW_PAGE: gl.constexpr = C[3]
    POOL_PAGE: gl.constexpr = C[4]
    seq_ptr, lo_ptr, hi_ptr, visible_ptr, table_ptr, pool_table_ptr, topk_indices_ptr = lists
    splits, table_width, pool_table_width, topk_width = widths
    position = lo + place
    slot = position // WINDOW_PAGE + (lo // WINDOW_PAGE % table_width - lo // WINDOW_PAGE)
    slot = gl.where(slot >= table_width, slot - table_width, slot)
    page = gl.load(table_ptr + seq.to(gl.int64) * table_width + slot, mask=place >= 0, other=0)
    rows = gl.where(place >= 0, page * WINDOW_PAGE + position % WINDOW_PAGE, -1)
    if POOL_PAGE > 0:
        entry = gl.where(entry < visible, entry, -1)
        table_ptr = pool_table_ptr + seq.to(gl.int64) * pool_table_width
        page = gl.load(table_ptr + entry // POOL_PAGE, mask=entry >= 0, other=0)
        rows = gl.where(entry >= 0, page * POOL_PAGE + entry % POOL_PAGE, rows)
    return rows


@gluon.jit
def _bring(
    into: gl.tensor,
    rows: gl.tensor,
    full: gl.tensor,
    of_window: gl.tensor,
    window_ptr: gl.tensor,
    pool_ptr: gl.tensor,
    channel: gl.tensor,
    L: gl.constexpr,
    C: gl.constexpr,
) -> None:
    """Bring the keys of a tile, 16 at a time, and say so to `full`; those that are not there become zeros.

    Plain rows are copied meanwhile; codes are decoded here, for as long as it takes.
    """
    DIM: gl.constexpr = C[1]
    KEYS: gl.constexpr = C[2]
    POOL_PAGE: gl.constexpr = C[4]
    WINDOW_ROW: gl.constexpr = C[10]
    POOL_ROW: gl.constexpr = C[11]
    base = window_ptr
    if POOL_PAGE > 0:
        base = gl.where(of_window, window_ptr, pool_ptr)
    if WINDOW_ROW == 0 and POOL_ROW == 0:
        for part in gl.static_range(KEYS // 16):
            at = rows.slice(part * 16, 16).load(L)
            from_ptr = base + at.to(gl.int64)[:, None] * DIM + channel
            _to_shared(into.slice(part * 16, 16), from_ptr, mask=(at >= 0)[:, None])
        async_copy.mbarrier_arrive(full, increment_count=False)
    else:
        if WINDOW_ROW == POOL_ROW:
            _decode(into, rows, base, WINDOW_ROW, DIM, KEYS)
        elif of_window:
            _decode(into, rows, window_ptr, WINDOW_ROW, DIM, KEYS)
        else:
            _decode(into, rows, pool_ptr, POOL_ROW, DIM, KEYS)
        fence_async_shared()
        mbarrier.arrive(full, count=128)


@gluon.jit
def _decode(
    into: gl.tensor, rows: gl.tensor, base: gl.tensor, ROW: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr
) -> None:
    """Rows of codes to bf16; ROW is `stored.row_code`. Threads take 8 channels of FP8 or 16 of FP4 at a time, a load of
    8 bytes with the scale of their block."""
    E4M3: gl.constexpr = ROW & 1
    BLOCK: gl.constexpr = (ROW >> 2) & 4095
    DIMS: gl.constexpr = (ROW >> 14) & 4095
    TAIL_AT: gl.constexpr = (ROW >> 26) & 4095
    SCALES_AT: gl.constexpr = (ROW >> 38) & 4095
    ROW_BYTES: gl.constexpr = ROW >> 50
    PIECE: gl.constexpr = 8 if E4M3 else 16
    PIECES: gl.constexpr = DIM // PIECE
    L3: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32, 1], [4, 1, 1], [2, 1, 0])
    L2: gl.constexpr = gl.SliceLayout(2, L3)
    piece = gl.arange(0, PIECES, gl.SliceLayout(0, L2))[None, :]
    byte = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L3)))[None, None, :]
    for part in gl.static_range(KEYS // 16):
        at = rows.slice(part * 16, 16).load(gl.SliceLayout(1, L2))
        row_ptr = base + at.to(gl.int64)[:, None] * ROW_BYTES
        coded = (at >= 0)[:, None] & (piece < DIMS // PIECE)
        scale = gl.load(row_ptr + SCALES_AT + piece * PIECE // BLOCK, mask=coded, other=0)
        from_ptr = row_ptr[:, :, None] + ((piece * 8)[:, :, None] + byte)
        codes = gl.load(from_ptr, mask=coded[:, :, None], other=0)
        factor = scale_value(scale, ROW)[:, :, None]
        if E4M3:
            value = (e4m3_value(codes) * factor).to(into.dtype)
        else:
            low = e2m1_value(codes) * factor
            high = e2m1_value(codes >> 4) * factor
            value = gl.join(low.to(into.dtype), high.to(into.dtype))
        if DIMS < DIM:
            tail_ptr = (row_ptr + TAIL_AT).to(gl.pointer_type(gl.bfloat16), bitcast=True)[:, :, None]
            behind = (at >= 0)[:, None] & (piece >= DIMS // PIECE)
            place = (piece * PIECE)[:, :, None] + byte - DIMS
            tail = gl.load(tail_ptr + place, mask=behind[:, :, None], other=0.0)
            value = gl.where((piece < DIMS // PIECE)[:, :, None], value, tail)
        into.slice(part * 16, 16).store(gl.reshape(value, [16, DIM]))


@gluon.jit
def _weigh(
    q_ptr: gl.tensor,
    window_ptr: gl.tensor,
    pool_ptr: gl.tensor,
    cos_ptr: gl.tensor,
    sin_ptr: gl.tensor,
    lists: gl.tensor,
    widths: gl.tensor,
    scale: gl.tensor,
    work_count: gl.tensor,
    qs: gl.tensor,
    ks: gl.tensor,
    ps: gl.tensor,
    where: gl.tensor,
    kept: gl.tensor,
    ends: gl.tensor,
    bars: gl.tensor,
    C: gl.constexpr,
) -> None:
    NUM_HEADS: gl.constexpr = C[0]
    DIM: gl.constexpr = C[1]
    KEYS: gl.constexpr = C[2]
    TURNED: gl.constexpr = C[7]
    NORM: gl.constexpr = C[8]
    EPS: gl.constexpr = C[9]
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    KL: gl.constexpr = gl.SliceLayout(1, BL)
    seq_ptr, lo_ptr, hi_ptr, visible_ptr, table_ptr, pool_table_ptr, topk_indices_ptr = lists
    q_full, full, weighed, empty, end_full, end_empty = bars
    channel = gl.arange(0, DIM, gl.SliceLayout(0, BL))[None, :]
    head = gl.arange(0, NUM_HEADS, KL)[:, None] * DIM
    zero = gl.zeros([NUM_HEADS, KEYS], gl.float32, SL)
    step = gl.num_programs(0)

    # the first row of q and the first tile
    ahead = gl.program_id(0)
    f_row, f_share, f_tile, f_last, f_stop, f_lo, f_window, f_window_tiles, f_visible = _span(ahead, lists, widths, C)
    f_seq = gl.maximum(gl.load(seq_ptr + f_row), 0)
    _to_shared(qs, q_ptr + f_row.to(gl.int64) * (NUM_HEADS * DIM) + head + channel)
    async_copy.mbarrier_arrive(q_full, increment_count=False)
    for early in gl.static_range(2):
        place, entry = _entries(f_tile, f_stop, f_row, f_window, f_window_tiles, lists, widths, C)
        where.index(early).store(_rows(place, entry, f_seq, f_lo, f_visible, lists, widths, C))
        of_window = f_tile < f_window_tiles
        if early == 0:
            _bring(ks.index(0), where.index(0), full.index(0), of_window, window_ptr, pool_ptr, channel, KL, C)
        more = ahead < work_count
        f_tile += 1
        if f_tile >= f_last:
            ahead += step
            if ahead < work_count:
                f_row, f_share, f_tile, f_last, f_stop, f_lo, f_window, f_window_tiles, f_visible = _span(
                    ahead, lists, widths, C
                )
                f_seq = gl.maximum(gl.load(seq_ptr + f_row), 0)

    count = 0
    turn = 0
    for work in range(gl.program_id(0), work_count, step):
        row, share, first, last, stop, lo, num_window, window_tiles, visible = _span(work, lists, widths, C)
        mbarrier.wait(q_full, turn & 1)
        if NORM > 0 or TURNED > 0:
            _prepare(qs, cos_ptr, sin_ptr, row, NUM_HEADS, DIM, TURNED, NORM, EPS)
        fence_async_shared()
        top = gl.full([NUM_HEADS], -1e30, gl.float32, gl.SliceLayout(1, SL))
        total = gl.zeros([NUM_HEADS], gl.float32, gl.SliceLayout(1, SL))
        for tile in range(first, last):
            # what lies two tiles ahead is looked up while this one is made
            place, entry = _entries(f_tile, f_stop, f_row, f_window, f_window_tiles, lists, widths, C)
            b = count & 1
            mbarrier.wait(full.index(b), (count >> 1) & 1)
            fence_async_shared()
            token = warpgroup_mma(qs, ks.index(b).permute([1, 0]), zero, use_acc=False, is_async=True)
            if more:  # the next tile, into the buffer of the one before this
                mbarrier.wait(empty.index(b ^ 1), (((count + 1) >> 1) & 1) ^ 1)
                n = b ^ 1
                _bring(ks.index(n), where.index(n), full.index(n), of_window, window_ptr, pool_ptr, channel, KL, C)
            rows = _rows(place, entry, f_seq, f_lo, f_visible, lists, widths, C)
            logit = warpgroup_mma_wait(0, [token])
            if tile == last - 1:
                if work + step < work_count:
                    next_row = _span(work + step, lists, widths, C)[0].to(gl.int64)
                    _to_shared(qs, q_ptr + next_row * (NUM_HEADS * DIM) + head + channel)
                    async_copy.mbarrier_arrive(q_full, increment_count=False)
            there = where.index(b).load(gl.SliceLayout(0, SL)) >= 0
            logit = gl.where(there[None, :], logit * scale, float("-inf"))
            higher = gl.maximum(top, gl.max(logit, 1))
            less = gl.exp2(top - higher)
            weight = gl.exp2(logit - higher[:, None])
            total = total * less + gl.sum(weight, 1)
            top = higher
            ps.index(b).store(weight.to(q_ptr.dtype.element_ty))
            kept.index(b).store(less)
            fence_async_shared()
            mbarrier.arrive(weighed.index(b), count=1)
            count += 1
            where.index(b).store(rows)
            more = ahead < work_count
            of_window = f_tile < f_window_tiles
            f_tile += 1
            if f_tile >= f_last:
                ahead += step
                if ahead < work_count:
                    f_row, f_share, f_tile, f_last, f_stop, f_lo, f_window, f_window_tiles, f_visible = _span(
                        ahead, lists, widths, C
                    )
                    f_seq = gl.maximum(gl.load(seq_ptr + f_row), 0)
        mbarrier.wait(end_empty, (turn & 1) ^ 1)
        ends.index(0).store(top)
        ends.index(1).store(total)
        mbarrier.arrive(end_full, count=1)
        turn += 1


@gluon.jit
def _prepare(
    qs: gl.tensor,
    cos_ptr: gl.tensor,
    sin_ptr: gl.tensor,
    row: gl.tensor,
    NUM_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    TURNED: gl.constexpr,
    NORM: gl.constexpr,
    EPS: gl.constexpr,
) -> None:
    """Norm and rotation of q where it lies, eight heads at a time."""
    QL: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [4, 1], [1, 0])
    for part in gl.static_range(NUM_HEADS // 8):
        some = qs.slice(part * 8, 8)
        q = some.load(QL)
        if NORM > 0:
            x = q.to(gl.float32)
            if NORM == 2:
                mean = gl.sum((x * x).to(q.dtype).to(gl.float32), 1) / DIM
                mean = (mean.to(q.dtype).to(gl.float32) + EPS).to(q.dtype).to(gl.float32)
                q = (x * gl.rsqrt(mean).to(q.dtype).to(gl.float32)[:, None]).to(q.dtype)
            else:
                q = (x * gl.rsqrt(gl.sum(x * x, 1) / DIM + EPS)[:, None]).to(q.dtype)
        if TURNED > 0:
            a, b = gl.split(gl.reshape(q.to(gl.float32), [8, DIM // 2, 2]))
            if part == 0:
                pair = gl.arange(0, DIM // 2, gl.SliceLayout(0, a.type.layout)) - (DIM - TURNED) // 2
                cos = gl.load(cos_ptr + row * (TURNED // 2) + pair, mask=pair >= 0, other=1.0)[None, :]
                sin = gl.load(sin_ptr + row * (TURNED // 2) + pair, mask=pair >= 0, other=0.0)[None, :]
            turned = gl.reshape(gl.join(a * cos - b * sin, b * cos + a * sin), [8, DIM])
            q = gl.convert_layout(turned, QL).to(q.dtype)
        some.store(q)


@gluon.jit
def _mix(
    out_ptr: gl.tensor,
    part_ptr: gl.tensor,
    sink_ptr: gl.tensor,
    cos_ptr: gl.tensor,
    sin_ptr: gl.tensor,
    lists: gl.tensor,
    widths: gl.tensor,
    work_count: gl.tensor,
    ks: gl.tensor,
    ps: gl.tensor,
    kept: gl.tensor,
    ends: gl.tensor,
    bars: gl.tensor,
    C: gl.constexpr,
) -> None:
    NUM_HEADS: gl.constexpr = C[0]
    DIM: gl.constexpr = C[1]
    SPLIT: gl.constexpr = C[6]
    TURNED: gl.constexpr = C[7]
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DIM // 2, 16])
    RL: gl.constexpr = gl.SliceLayout(1, OL)
    splits, table_width, pool_table_width, topk_width = widths
    q_full, full, weighed, empty, end_full, end_empty = bars
    head = gl.arange(0, NUM_HEADS, RL)
    channel = gl.arange(0, DIM, gl.SliceLayout(0, OL))
    count = 0
    turn = 0
    for work in range(gl.program_id(0), work_count, gl.num_programs(0)):
        row, share, first, last, stop, lo, num_window, window_tiles, visible = _span(work, lists, widths, C)
        mixed = gl.zeros([NUM_HEADS, DIM], gl.float32, OL)
        for _ in range(first, last):
            b = count & 1
            mbarrier.wait(weighed.index(b), (count >> 1) & 1)
            mbarrier.wait(full.index(b), (count >> 1) & 1)
            fence_async_shared()
            mixed = mixed * kept.index(b).load(RL)[:, None]
            token = warpgroup_mma(ps.index(b), ks.index(b), mixed, is_async=True)
            mixed = warpgroup_mma_wait(0, [token])
            mbarrier.arrive(empty.index(b), count=1)
            count += 1
        mbarrier.wait(end_full, turn & 1)
        top = ends.index(0).load(RL)
        total = ends.index(1).load(RL)
        mbarrier.arrive(end_empty, count=1)
        turn += 1
        if SPLIT:
            at = (row.to(gl.int64) * splits + share) * NUM_HEADS + head
            gl.store(part_ptr + at * 2, top)
            gl.store(part_ptr + at * 2 + 1, total)
            gl.store(out_ptr + at[:, None] * DIM + channel[None, :], mixed, mask=(total > 0)[:, None])
        else:
            sink = gl.load(sink_ptr + head) * 1.4426950408889634
            higher = gl.maximum(top, sink)
            less = gl.exp2(top - higher)
            factor = less / (total * less + gl.exp2(sink - higher))
            out = (mixed * factor[:, None]).to(out_ptr.dtype.element_ty)
            to = out_ptr + (row * NUM_HEADS + head).to(gl.int64)[:, None] * DIM
            if TURNED > 0:
                a, b2 = gl.split(gl.reshape(out.to(gl.float32), [NUM_HEADS, DIM // 2, 2]))
                PL: gl.constexpr = gl.SliceLayout(0, a.type.layout)
                pair = gl.arange(0, DIM // 2, PL) - (DIM - TURNED) // 2
                cos = gl.load(cos_ptr + row * (TURNED // 2) + pair, mask=pair >= 0, other=1.0)[None, :]
                sin = gl.load(sin_ptr + row * (TURNED // 2) + pair, mask=pair >= 0, other=0.0)[None, :]
                out = gl.reshape(gl.join(a * cos + b2 * sin, b2 * cos - a * sin), [NUM_HEADS, DIM])
                out = gl.convert_layout(out, OL).to(out_ptr.dtype.element_ty)
            gl.store(to + channel[None, :], out)


@gluon.jit(do_not_specialize=("table_width", "pool_table_width", "topk_width", "splits", "work_count"))
def attend_stream(
    q_ptr: gl.tensor,
    window_ptr: gl.tensor,
    table_ptr: gl.tensor,
    seq_ptr: gl.tensor,
    lo_ptr: gl.tensor,
    hi_ptr: gl.tensor,
    sink_ptr: gl.tensor,
    pool_ptr: gl.tensor,
    pool_table_ptr: gl.tensor,
    visible_ptr: gl.tensor,
    topk_indices_ptr: gl.tensor,
    cos_ptr: gl.tensor,
    sin_ptr: gl.tensor,
    out_ptr: gl.tensor,
    part_ptr: gl.tensor,
    scale: gl.float32,
    table_width: gl.int32,
    pool_table_width: gl.int32,
    topk_width: gl.int32,
    splits: gl.int32,
    work_count: gl.int32,
    NUM_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    TURNED: gl.constexpr,
    NORM: gl.constexpr,
    EPS: gl.constexpr,
    WINDOW_PAGE: gl.constexpr,
    POOL_PAGE: gl.constexpr,
    TOPK: gl.constexpr,
    WINDOW_ROW: gl.constexpr,
    POOL_ROW: gl.constexpr,
    KEYS: gl.constexpr,
    SPLIT: gl.constexpr,
    REGISTERS: gl.constexpr,
) -> None:
    """As `attend_share`; `work_count` rows, or rows x splits."""
    C: gl.constexpr = (
        NUM_HEADS, DIM, KEYS, WINDOW_PAGE, POOL_PAGE, TOPK, SPLIT, TURNED, NORM, EPS, WINDOW_ROW, POOL_ROW,
    )  # fmt: skip
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    qs = gl.allocate_shared_memory(dtype, [NUM_HEADS, DIM], ROWS)
    ks = gl.allocate_shared_memory(dtype, [2, KEYS, DIM], ROWS)
    ps = gl.allocate_shared_memory(dtype, [2, NUM_HEADS, KEYS], ROWS)
    kept = gl.allocate_shared_memory(gl.float32, [2, NUM_HEADS], FLAT)
    where = gl.allocate_shared_memory(gl.int32, [2, KEYS], FLAT)  # rows of the pages
    ends = gl.allocate_shared_memory(gl.float32, [2, NUM_HEADS], FLAT)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    end_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    end_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=128)  # every copying thread says when its own copies have come
    mbarrier.init(end_full, count=1)
    mbarrier.init(end_empty, count=1)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(weighed.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    lists = (seq_ptr, lo_ptr, hi_ptr, visible_ptr, table_ptr, pool_table_ptr, topk_indices_ptr)
    widths = (splits, table_width, pool_table_width, topk_width)
    bars = (q_full, full, weighed, empty, end_full, end_empty)
    gl.warp_specialize(
        [
            (
                _mix,
                (out_ptr, part_ptr, sink_ptr, cos_ptr, sin_ptr, lists, widths, work_count, ks, ps, kept, ends, bars, C),
            ),
            (
                _weigh,
                (
                    q_ptr,
                    window_ptr,
                    pool_ptr,
                    cos_ptr,
                    sin_ptr,
                    lists,
                    widths,
                    scale,
                    work_count,
                    qs,
                    ks,
                    ps,
                    where,
                    kept,
                    ends,
                    bars,
                    C,
                ),
            ),
        ],
        [4],
        [REGISTERS],
    )
