"""The kernels behind `triton.py`, `hyper_head` and `hyper_read`; importing it needs Triton.

The product x · fnᵀ has few outputs and a long inner side, so channels are shared out among programs and their sums
added in a fixed order. bf16 streams are multiplied on tensor cores, exactly: fp32 weights are the sum of three bf16
numbers. Other streams are multiplied in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from spyglass.ops.fake_quant.triton_kernel import round_blocks, rounding
from spyglass.ops.gpu import overlap
from spyglass.ops.hyper_expand.triton_kernel import expand
from spyglass.ops.overlap import begin
from spyglass.quant.formats import FakeQuant

_SINGLE = 16  # rows up to which they are multiplied one by one
_FEW = 32  # rows up to which the streams are made and multiplied in one launch
_MANY = 128  # rows beyond which a program takes more of them, and more channels


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What programs found in S shares of the channels: products [T.., S, J padded], sums of squares [T.., S], fp32."""

    products: torch.Tensor
    squares: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """What a sub-layer gave (`shared_TC` is added first, where it is given), how it is written, the streams to be."""

    z_TC: torch.Tensor
    shared_TC: torch.Tensor | None
    post_TM: torch.Tensor
    comb_TMM: torch.Tensor
    out_TMC: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The input of the next sub-layer, to be written: streams collapsed by `pre_TM` or the pre found, and normed.

    With `quant`, rounded into `rounded_TC` as well.
    """

    x_TC: torch.Tensor
    weight_C: torch.Tensor
    eps: float
    pre_TM: torch.Tensor | None
    quant: FakeQuant | None
    rounded_TC: torch.Tensor | None


def project(streams_TMC: torch.Tensor, fn_JE: torch.Tensor, write: Write | None = None) -> Sums:
    """Products and squares of the streams; with `write`, of the streams that it makes. All contiguous."""
    rows, streams, width = streams_TMC.shape
    if write is not None and rows > _FEW:
        expand(write.z_TC, streams_TMC, write.post_TM, write.comb_TMM, write.out_TMC, write.shared_TC)
        streams_TMC, write = write.out_TMC, None
    J, E = fn_JE.shape
    OUTPUTS = max(triton.next_power_of_2(J), 16)
    single = rows <= _SINGLE
    if single or write is not None:
        WIDTH = 64 if single else 32
        splits = triton.cdiv(width, WIDTH)
    else:
        WIDTH, STEPS = 64, 32 if rows > _MANY else 4
        splits = triton.cdiv(E, WIDTH * STEPS)
    # a program that multiplies by hand takes a row or a few, and holds the weights meanwhile
    few = min(4, triton.next_power_of_2(triton.cdiv(rows, 2))) if single else 1
    room = triton.cdiv(rows, few) * few
    sums = Sums(
        products=torch.empty((room, splits, OUTPUTS), dtype=torch.float32, device=streams_TMC.device),
        squares=torch.empty((room, splits), dtype=torch.float32, device=streams_TMC.device),
    )
    if rows == 0:
        return sums
    if write is None and not single:
        ROWS = 64 if rows > _MANY else 16
        _project_rows[(triton.cdiv(rows, ROWS), splits)](
            streams_TMC, fn_JE, sums.products, sums.squares, rows, E, J, splits,
            ROWS=ROWS, WIDTH=WIDTH, STEPS=STEPS, OUTPUTS=OUTPUTS, num_warps=4, num_stages=3, **overlap(sums.products),
        )  # fmt: skip
        return sums
    shared = None if write is None else write.shared_TC
    ROWS = few if single else 16
    kernel = _project_single if single else _write_and_project
    kernel[(triton.cdiv(rows, ROWS), splits)](
        streams_TMC, fn_JE, sums.products, sums.squares, streams_TMC if write is None else write.z_TC,
        streams_TMC if shared is None else shared, sums.squares if write is None else write.post_TM,
        sums.squares if write is None else write.comb_TMM, streams_TMC if write is None else write.out_TMC, rows, width,
        J, splits,
        WRITES=write is not None, SHARED=shared is not None, STREAMS=streams, STREAMS_2=triton.next_power_of_2(streams),
        ROWS=ROWS, WIDTH=WIDTH, OUTPUTS=OUTPUTS, num_warps=8 if single else 4, **overlap(sums.products),
    )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["rows"])
def _project_single(
    streams_ptr, fn_ptr, products_ptr, squares_ptr, z_ptr, shared_ptr, post_ptr, comb_ptr, out_ptr, rows, width,
    outputs, splits,
    WRITES: tl.constexpr, SHARED: tl.constexpr, STREAMS: tl.constexpr, STREAMS_2: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Some channels of all streams of ROWS rows, multiplied and added up without tensor cores."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    split = tl.program_id(1)
    place = tl.arange(0, STREAMS_2 * WIDTH)
    target, channel = place // WIDTH, split * WIDTH + place % WIDTH
    inside = (target < STREAMS) & (channel < width)
    output = tl.arange(0, OUTPUTS)
    fn_at = (output[:, None] * STREAMS + target[None, :]) * width + channel[None, :]
    fn = tl.load(fn_ptr + fn_at, mask=(output < outputs)[:, None] & inside[None, :], other=0.0)
    begin(OVERLAPS)
    # all rows are asked for before any is used: a load may not pass a store
    first = (tl.program_id(0) * ROWS).to(tl.int64)
    given: tl.tensor = ()
    for index in tl.static_range(ROWS):
        row = first + index
        there = inside & (0 * place + row < rows)
        if WRITES:
            z = tl.load(z_ptr + row * width + channel, mask=there, other=0.0).to(tl.float32)
            if SHARED:
                shared = tl.load(shared_ptr + row * width + channel, mask=there, other=0.0).to(tl.float32)
                z = (z + shared).to(DTYPE).to(tl.float32)
            x = tl.load(post_ptr + row * STREAMS + target, mask=there, other=0.0) * z
            mixed = tl.zeros([STREAMS_2 * WIDTH], tl.float32)
            for m in tl.static_range(STREAMS):
                comb = tl.load(comb_ptr + (row * STREAMS + m) * STREAMS + target, mask=there, other=0.0)
                stream = tl.load(streams_ptr + (row * STREAMS + m) * width + channel, mask=there, other=0.0)
                mixed += comb * stream.to(tl.float32)
            x = (x + mixed).to(DTYPE)
        else:
            x = tl.load(streams_ptr + (row * STREAMS + target) * width + channel, mask=there, other=0.0)
        given = given + (x,)
    for index in tl.static_range(ROWS):
        row = first + index
        x = given[index]
        if WRITES:
            there = inside & (0 * place + row < rows)
            tl.store(out_ptr + (row * STREAMS + target) * width + channel, x, mask=there)
        x = x.to(tl.float32)
        to = row * splits + split
        tl.store(products_ptr + to * OUTPUTS + output, tl.sum(fn * x[None, :], axis=1))
        tl.store(squares_ptr + to, tl.sum(x * x, axis=0))


@triton.jit(do_not_specialize=["rows"])
def _write_and_project(
    streams_ptr, fn_ptr, products_ptr, squares_ptr, z_ptr, shared_ptr, post_ptr, comb_ptr, out_ptr, rows, width,
    outputs, splits,
    WRITES: tl.constexpr, SHARED: tl.constexpr, STREAMS: tl.constexpr, STREAMS_2: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Some channels of all streams of ROWS rows: written, rounded and multiplied."""
    begin(OVERLAPS)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    split = tl.program_id(1)
    here = row < rows
    output = tl.arange(0, OUTPUTS)
    products = tl.zeros([ROWS, OUTPUTS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    channel = split * WIDTH + tl.arange(0, WIDTH)
    there = here[:, None] & (channel < width)[None, :]
    z = tl.load(z_ptr + row[:, None] * width + channel[None, :], mask=there, other=0.0).to(tl.float32)
    if SHARED:
        shared = tl.load(shared_ptr + row[:, None] * width + channel[None, :], mask=there, other=0.0)
        z = (z + shared.to(tl.float32)).to(DTYPE).to(tl.float32)
    streams: tl.tensor = ()  # a load may not pass a store, so all come first
    for m in tl.static_range(STREAMS):
        from_ptr = streams_ptr + (row * STREAMS + m)[:, None] * width + channel[None, :]
        streams = streams + (tl.load(from_ptr, mask=there, other=0.0),)
    written: tl.tensor = ()
    for target in tl.static_range(STREAMS):
        mixed = tl.zeros([ROWS, WIDTH], tl.float32)
        for m in tl.static_range(STREAMS):
            comb = tl.load(comb_ptr + (row * STREAMS + m) * STREAMS + target, mask=here, other=0.0)
            mixed += comb[:, None] * streams[m].to(tl.float32)
        post = tl.load(post_ptr + row * STREAMS + target, mask=here, other=0.0)
        x = (post[:, None] * z + mixed).to(DTYPE)
        written = written + (x,)
        squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
        # [WIDTH, OUTPUTS], as the second side of a product wants it
        fn_at = (output[None, :] * STREAMS + target) * width + channel[:, None]
        fn_there = (channel < width)[:, None] & (output < outputs)[None, :]
        products = multiply(x, tl.load(fn_ptr + fn_at, mask=fn_there, other=0.0), products)
    for target in tl.static_range(STREAMS):
        to_ptr = out_ptr + (row * STREAMS + target)[:, None] * width + channel[None, :]
        tl.store(to_ptr, written[target], mask=there)
    at = row * splits + split
    tl.store(products_ptr + at[:, None] * OUTPUTS + output[None, :], products, mask=here[:, None])
    tl.store(squares_ptr + at, squares, mask=here)


@triton.jit(do_not_specialize=["rows"])
def _project_rows(
    x_ptr, fn_ptr, products_ptr, squares_ptr, rows, width, outputs, splits,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, OUTPUTS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Rows of all streams side by side, `width` channels in all, against a share of the matrix."""
    begin(OVERLAPS)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    split = tl.program_id(1)
    here = row < rows
    output = tl.arange(0, OUTPUTS)
    products = tl.zeros([ROWS, OUTPUTS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for step in range(STEPS):
        channel = (split * STEPS + step) * WIDTH + tl.arange(0, WIDTH)
        there = here[:, None] & (channel < width)[None, :]
        x = tl.load(x_ptr + row[:, None] * width + channel[None, :], mask=there, other=0.0)
        squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
        fn_there = (channel < width)[:, None] & (output < outputs)[None, :]
        fn = tl.load(fn_ptr + output[None, :] * width + channel[:, None], mask=fn_there, other=0.0)
        products = multiply(x, fn, products)
    at = row * splits + split
    tl.store(products_ptr + at[:, None] * OUTPUTS + output[None, :], products, mask=here[:, None])
    tl.store(squares_ptr + at, squares, mask=here)


@triton.jit
def multiply(x, weight, total) -> tl.tensor:
    """total + x · weight for fp32 weights, no bit of them lost."""
    if x.dtype == tl.bfloat16:
        high = weight.to(tl.bfloat16)
        rest = weight - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(x, low, total)
        total = tl.dot(x, middle, total)
        return tl.dot(x, high, total)
    return tl.dot(x.to(tl.float32), weight, total, input_precision="ieee")


def finish(
    sums: Sums,
    streams_TMC: torch.Tensor,
    scale_3: torch.Tensor,
    base_J: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    rounds: int,
    read: Read | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pre, post and comb from their sums; with `read`, what is read from the streams as well."""
    rows, streams, width = streams_TMC.shape
    pre_TM = torch.empty((rows, streams), dtype=torch.float32, device=streams_TMC.device)
    post_TM, comb_TMM = torch.empty_like(pre_TM), pre_TM.new_empty((rows, streams, streams))
    if rows == 0:
        return pre_TM, post_TM, comb_TMM
    splits, OUTPUTS = sums.products.shape[1:]
    given_TM = None if read is None else read.pre_TM
    _finish[(rows, 2)](
        sums.products, sums.squares, scale_3, base_J, pre_TM, post_TM, comb_TMM, streams_TMC,
        base_J if read is None else read.weight_C, pre_TM if given_TM is None else given_TM,
        streams_TMC if read is None else read.x_TC,
        streams_TMC if read is None or read.rounded_TC is None else read.rounded_TC, width, splits, norm_eps, hc_eps,
        0.0 if read is None else read.eps,
        ROUNDS=rounds, COLLAPSES=read is not None, GIVEN=given_TM is not None,
        **rounding(None if read is None else read.quant), STREAMS=streams, STREAMS_2=triton.next_power_of_2(streams),
        OUTPUTS=OUTPUTS, SPLITS=triton.next_power_of_2(splits),
        WIDTH=triton.next_power_of_2(width) if read is not None else 1, num_warps=8 if read is not None else 1,
        enable_fp_fusion=False, **overlap(sums.products),
    )  # fmt: skip
    return pre_TM, post_TM, comb_TMM


@triton.jit
def _finish(
    products_ptr, squares_ptr, scale_ptr, base_ptr, pre_ptr, post_ptr, comb_ptr, streams_ptr, weight_ptr, given_ptr,
    x_ptr, rounded_ptr, width, splits, norm_eps, hc_eps, rms_eps,
    ROUNDS: tl.constexpr, COLLAPSES: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr, E4M3: tl.constexpr,
    E4M3_SCALE: tl.constexpr, STREAMS: tl.constexpr, STREAMS_2: tl.constexpr, OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Two programs a row: one reads the streams by pre, one finds how they are written."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    split, output = tl.arange(0, SPLITS), tl.arange(0, OUTPUTS)
    there = split < splits
    squares = tl.load(squares_ptr + row * splits + split, mask=there, other=0.0)
    from_ptr = products_ptr + (row * splits + split)[:, None] * OUTPUTS + output[None, :]
    products = tl.load(from_ptr, mask=there[:, None], other=0.0)
    if tl.program_id(1) == 0:
        channel = tl.arange(0, WIDTH)
        streams: tl.tensor = ()  # asked for before anything is waited for; a load may not pass a store
        if COLLAPSES:
            for m in tl.static_range(STREAMS):
                at = (row * STREAMS + m) * width + channel
                streams = streams + (tl.load(streams_ptr + at, mask=channel < width, other=0.0),)
            weight = tl.load(weight_ptr + channel, mask=channel < width, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(squares, axis=0) / (width * STREAMS) + norm_eps)
        found = tl.sum(products, axis=0) * inverse * tl.load(scale_ptr)
        found = sigmoid(found + tl.load(base_ptr + output, mask=output < STREAMS, other=0.0)) + hc_eps
        tl.store(pre_ptr + row * STREAMS + output, found, mask=output < STREAMS)
        total = tl.zeros([WIDTH], tl.float32)
        if COLLAPSES:
            for m in tl.static_range(STREAMS):
                if GIVEN:
                    pre = tl.load(given_ptr + row * STREAMS + m)
                else:
                    pre = _element(found, output, m)
                total += pre * streams[m].to(tl.float32)
        if COLLAPSES:
            x = total.to(x_ptr.dtype.element_ty).to(tl.float32)
            x = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + rms_eps)
            x = weight * x
            tl.store(x_ptr + row * width + channel, x.to(x_ptr.dtype.element_ty), mask=channel < width)
            if BLOCK > 0:
                x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
                x = tl.reshape(round_blocks(tl.reshape(x, (WIDTH // BLOCK, BLOCK)), E4M3, E4M3_SCALE), (WIDTH,))
                tl.store(rounded_ptr + row * width + channel, x.to(x_ptr.dtype.element_ty), mask=channel < width)
    else:
        inverse = tl.rsqrt(tl.sum(squares, axis=0) / (width * STREAMS) + norm_eps)
        found = tl.sum(products, axis=0) * inverse
        is_post = (output >= STREAMS) & (output < 2 * STREAMS)
        is_comb = (output >= 2 * STREAMS) & (output < 2 * STREAMS + STREAMS * STREAMS)
        scale = tl.where(is_post, tl.load(scale_ptr + 1), tl.load(scale_ptr + 2))
        found = found * scale + tl.load(base_ptr + output, mask=is_post | is_comb, other=0.0)
        tl.store(post_ptr + row * STREAMS + output - STREAMS, 2 * sigmoid(found), mask=is_post)
        comb_ptr += row * STREAMS * STREAMS
        if STREAMS == 4:
            _balance_four(found, output, comb_ptr, hc_eps, ROUNDS)
        else:
            tl.store(comb_ptr + output - 2 * STREAMS, found, mask=is_comb)
            tl.debug_barrier()
            source, target = tl.arange(0, STREAMS_2), tl.arange(0, STREAMS_2)
            real = source < STREAMS
            both = real[:, None] & (target < STREAMS)[None, :]
            place = source[:, None] * STREAMS + target[None, :]
            comb = tl.load(comb_ptr + place, mask=both, other=float("-inf"))
            comb = tl.exp(comb - tl.max(tl.where(real[:, None], comb, 0.0), axis=1)[:, None])
            comb = tl.where(both, comb / tl.sum(comb, axis=1)[:, None] + hc_eps, 0.0)
            comb = comb / (tl.sum(comb, axis=0)[None, :] + hc_eps)
            for _ in range(ROUNDS - 1):
                comb = comb / (tl.sum(comb, axis=1)[:, None] + hc_eps)
                comb = comb / (tl.sum(comb, axis=0)[None, :] + hc_eps)
            tl.debug_barrier()
            tl.store(comb_ptr + place, comb, mask=both)


@triton.jit
def _balance_four(logits, place, comb_ptr, eps, ROUNDS: tl.constexpr) -> None:
    """The softmax of the rows of a 4 x 4 matrix, whose first logit is element 8, and Sinkhorn rounds: all in the
    registers of one thread, since each step waits for the one before.
    """
    a0, a1, a2, a3 = _softmax_of_four(logits, place, 8, eps)
    b0, b1, b2, b3 = _softmax_of_four(logits, place, 12, eps)
    c0, c1, c2, c3 = _softmax_of_four(logits, place, 16, eps)
    d0, d1, d2, d3 = _softmax_of_four(logits, place, 20, eps)
    for turn in range(ROUNDS):
        if turn > 0:
            a0, a1, a2, a3 = _share(a0, a1, a2, a3, eps)
            b0, b1, b2, b3 = _share(b0, b1, b2, b3, eps)
            c0, c1, c2, c3 = _share(c0, c1, c2, c3, eps)
            d0, d1, d2, d3 = _share(d0, d1, d2, d3, eps)
        a0, b0, c0, d0 = _share(a0, b0, c0, d0, eps)
        a1, b1, c1, d1 = _share(a1, b1, c1, d1, eps)
        a2, b2, c2, d2 = _share(a2, b2, c2, d2, eps)
        a3, b3, c3, d3 = _share(a3, b3, c3, d3, eps)
    _store_four(comb_ptr, a0, a1, a2, a3)
    _store_four(comb_ptr + 4, b0, b1, b2, b3)
    _store_four(comb_ptr + 8, c0, c1, c2, c3)
    _store_four(comb_ptr + 12, d0, d1, d2, d3)


@triton.jit
def _softmax_of_four(logits, place, first: tl.constexpr, eps) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """softmax + eps of elements `first` to `first` + 3."""
    a, b = _element(logits, place, first), _element(logits, place, first + 1)
    c, d = _element(logits, place, first + 2), _element(logits, place, first + 3)
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    total = (a + b) + (c + d)
    return a / total + eps, b / total + eps, c / total + eps, d / total + eps


@triton.jit
def _element(values, place, which: tl.constexpr) -> tl.tensor:
    return tl.sum(tl.where(place == which, values, 0.0), axis=0)


@triton.jit
def _share(a, b, c, d, eps) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    factor = 1 / ((a + b) + (c + d) + eps)
    return a * factor, b * factor, c * factor, d * factor


@triton.jit
def _store_four(to, a, b, c, d) -> None:
    tl.store(to, a)
    tl.store(to + 1, b)
    tl.store(to + 2, c)
    tl.store(to + 3, d)


@triton.jit
def sigmoid(x) -> tl.tensor:
    """1 / (1 + e^-x), fp32."""
    return 1 / (1 + tl.exp(-x))
