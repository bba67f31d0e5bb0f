"""Gradients of reading and writing the residual streams; importing it needs Triton.

A sub-layer reads x = w c r, c = Σ_m pre_m S_m, r = rsqrt(mean c² + eps); S_l = post_l z + Σ_m comb_ml S°_m was written
before. With g' = w g of the gradient g of x, α = r and β = r³ mean(g' c):

    dc = α g' - β c,  dpre_m = Σ_c dc S_m,  dS_m = pre_m dc + Σ_j dp_j fn_jm + κ S_m + what comes from above
    dz = Σ_l post_l dS_l,  dS°_m = Σ_l comb_ml dS_l,  dpost_l = Σ_c dS_l z,  dcomb_ml = Σ_c dS_l S°_m

p = S fnᵀ is what the coefficients are made of, κ what comes through the size of S. Every sum has a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from spyglass.ops.hyper_mix.triton_kernel import Sums, sigmoid

_ROWS, _WIDTH = 16, 64  # of a tile
_WALK = 1024  # channels that a row's program takes at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """How a row was read, and what the gradient of x makes of that: numbers of each row, fp32."""

    pre_TM: torch.Tensor
    weight_C: torch.Tensor
    grad_TC: torch.Tensor
    alpha_T: torch.Tensor
    beta_T: torch.Tensor
    dpre_TM: torch.Tensor


def read_gradient(
    streams_TMC: torch.Tensor, pre_TM: torch.Tensor, weight_C: torch.Tensor, grad_TC: torch.Tensor, eps: float
) -> Read:
    """α, β and the gradient of pre; all contiguous."""
    rows, streams, width = streams_TMC.shape
    alpha_T = torch.empty(rows, dtype=torch.float32, device=pre_TM.device)
    read = Read(
        pre_TM=pre_TM,
        weight_C=weight_C,
        grad_TC=grad_TC,
        alpha_T=alpha_T,
        beta_T=torch.empty_like(alpha_T),
        dpre_TM=torch.empty_like(pre_TM),
    )
    if rows:
        _read_gradient[(rows,)](
            streams_TMC, pre_TM, weight_C, grad_TC, read.alpha_T, read.beta_T, read.dpre_TM, width, eps,
            STREAMS=streams, WIDTH=_WALK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return read


@triton.jit
def _read_gradient(
    streams_ptr, pre_ptr, weight_ptr, grad_ptr, alpha_ptr, beta_ptr, dpre_ptr, width, eps,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, STREAMS)[:, None]
    pre = tl.load(pre_ptr + row * STREAMS + m)
    squares, shares = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    by_grad, by_c = tl.zeros([STREAMS, WIDTH], tl.float32), tl.zeros([STREAMS, WIDTH], tl.float32)
    for first in range(0, width, WIDTH):
        channel = first + tl.arange(0, WIDTH)
        there = channel < width
        both = there[None, :] & (m >= 0)
        stream = tl.load(streams_ptr + (row * STREAMS + m) * width + channel[None, :], mask=both, other=0.0)
        c = tl.sum(pre * stream.to(tl.float32), axis=0).to(streams_ptr.dtype.element_ty).to(tl.float32)
        grad = tl.load(grad_ptr + row * width + channel, mask=there, other=0.0).to(tl.float32)
        grad *= tl.load(weight_ptr + channel, mask=there, other=0.0).to(tl.float32)
        squares += c * c
        shares += grad * c
        by_grad += grad[None, :] * stream.to(tl.float32)
        by_c += c[None, :] * stream.to(tl.float32)
    alpha = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)
    beta = alpha * alpha * alpha * (tl.sum(shares, axis=0) / width)
    tl.store(alpha_ptr + row, alpha)
    tl.store(beta_ptr + row, beta)
    dpre = alpha * tl.sum(by_grad, axis=1) - beta * tl.sum(by_c, axis=1)
    tl.store(dpre_ptr + row * STREAMS + tl.arange(0, STREAMS), dpre)


def mix_gradient(
    sums: Sums,
    scale_3: torch.Tensor,
    base_J: torch.Tensor,
    dpre_TM: torch.Tensor,
    dpost_TM: torch.Tensor,
    dcomb_TMM: torch.Tensor,
    width: int,
    *,
    norm_eps: float,
    hc_eps: float,
    rounds: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dp [T, J] and κ [T] from the gradients of pre, post and comb (contiguous); `width` of a stream."""
    (rows, streams), (splits, outputs) = dpre_TM.shape, sums.products.shape[1:]
    dp_TJ = torch.empty(rows, len(base_J), dtype=torch.float32, device=dpre_TM.device)
    kappa_T = torch.empty(rows, dtype=torch.float32, device=dpre_TM.device)
    scratch = torch.empty(rows, 2 * rounds - 1, streams, dtype=torch.float32, device=dpre_TM.device)
    if rows:
        ROWS = 32
        _mix_gradient[(triton.cdiv(rows, ROWS),)](
            sums.products, sums.squares, scale_3, base_J, dpre_TM, dpost_TM, dcomb_TMM, scratch, dp_TJ, kappa_T, rows,
            splits, width, norm_eps, hc_eps,
            ROUNDS=rounds, STREAMS=streams, OUTPUTS=outputs, ROWS=ROWS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return dp_TJ, kappa_T


@triton.jit(do_not_specialize=["rows"])
def _mix_gradient(
    products_ptr, squares_ptr, scale_ptr, base_ptr, dpre_ptr, dpost_ptr, dcomb_ptr, scratch_ptr, dp_ptr, kappa_ptr,
    rows, splits, width, norm_eps, hc_eps,
    ROUNDS: tl.constexpr, STREAMS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    M: tl.constexpr = STREAMS
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    here = row < rows
    one, many = row[:, None], row[:, None, None]
    m, source, target = tl.arange(0, M)[None, :], tl.arange(0, M)[None, :, None], tl.arange(0, M)[None, None, :]
    place = source * M + target
    there, all_there = here[:, None] & (m >= 0), here[:, None, None] & (place >= 0)
    squares = tl.zeros([ROWS], tl.float32)
    pre, post = tl.zeros([ROWS, M], tl.float32), tl.zeros([ROWS, M], tl.float32)
    comb = tl.zeros([ROWS, M, M], tl.float32)
    for split in range(splits):
        squares += tl.load(squares_ptr + row * splits + split, mask=here, other=0.0)
        first = products_ptr + split * OUTPUTS
        pre += tl.load(first + one * splits * OUTPUTS + m, mask=there, other=0.0)
        post += tl.load(first + one * splits * OUTPUTS + M + m, mask=there, other=0.0)
        comb += tl.load(first + many * splits * OUTPUTS + 2 * M + place, mask=all_there, other=0.0)
    inverse = tl.rsqrt(squares / (width * M) + norm_eps)
    low, deep = inverse[:, None], inverse[:, None, None]
    # what m gets, and of that what the size of the streams gets
    scale = tl.load(scale_ptr)
    share = sigmoid(pre * low * scale + tl.load(base_ptr + m))
    dm = tl.load(dpre_ptr + one * M + m, mask=there, other=0.0) * share * (1 - share) * scale
    tl.store(dp_ptr + one * (M * M + 2 * M) + m, dm * low, mask=there)
    dinverse = tl.sum(dm * pre, axis=1)
    scale = tl.load(scale_ptr + 1)
    share = sigmoid(post * low * scale + tl.load(base_ptr + M + m))
    dm = tl.load(dpost_ptr + one * M + m, mask=there, other=0.0) * 2 * share * (1 - share) * scale
    tl.store(dp_ptr + one * (M * M + 2 * M) + M + m, dm * low, mask=there)
    dinverse += tl.sum(dm * post, axis=1)
    scale = tl.load(scale_ptr + 2)
    logits = comb * deep * scale + tl.load(base_ptr + 2 * M + place)
    soft = tl.exp(logits - tl.max(logits, axis=2)[:, :, None])
    soft = soft / tl.sum(soft, axis=2)[:, :, None]
    # forward keeps the divisors of every round; backward undoes one after the other
    y = soft + hc_eps
    keep = scratch_ptr + one * ((2 * ROUNDS - 1) * M) + m
    for turn in range(ROUNDS):
        if turn > 0:
            divisor = tl.sum(y, axis=2) + hc_eps
            tl.store(keep + (2 * turn - 1) * M, divisor, mask=there)
            y = y / divisor[:, :, None]
        divisor = tl.sum(y, axis=1) + hc_eps
        tl.store(keep + 2 * turn * M, divisor, mask=there)
        y = y / divisor[:, None, :]
    tl.debug_barrier()
    dy = tl.load(dcomb_ptr + many * (M * M) + place, mask=all_there, other=0.0)
    for back in range(ROUNDS):
        turn = ROUNDS - 1 - back
        divisor = tl.load(keep + 2 * turn * M, mask=there, other=1.0)
        dy = (dy - tl.sum(dy * y, axis=1)[:, None, :]) / divisor[:, None, :]
        y = y * divisor[:, None, :]
        if turn > 0:
            divisor = tl.load(keep + (2 * turn - 1) * M, mask=there, other=1.0)
            dy = (dy - tl.sum(dy * y, axis=2)[:, :, None]) / divisor[:, :, None]
            y = y * divisor[:, :, None]
    dm3 = soft * (dy - tl.sum(dy * soft, axis=2)[:, :, None]) * scale
    tl.store(dp_ptr + many * (M * M + 2 * M) + 2 * M + place, dm3 * deep, mask=all_there)
    dinverse += tl.sum(tl.sum(dm3 * comb, axis=2), axis=1)
    kappa = -dinverse * inverse * inverse * inverse / (width * M)
    tl.store(kappa_ptr + row, kappa, mask=here)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """What the coefficients' gradients are spread by."""

    dp_TJ: torch.Tensor
    kappa_T: torch.Tensor
    fn_JE: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written into the streams; `shared_TC` was added to z first, where it is given."""

    z_TC: torch.Tensor
    shared_TC: torch.Tensor | None
    streams_TMC: torch.Tensor
    post_TM: torch.Tensor
    comb_TMM: torch.Tensor


def streams_gradient(
    streams_TMC: torch.Tensor,
    grad_TMC: torch.Tensor | None,
    read: tuple[Read, Mixed] | None,
    written: Written | None,
) -> tuple[torch.Tensor, ...]:
    """dS; with `written` instead dz, dS°, dpost and dcomb. `grad_TMC` is what comes from above; all contiguous."""
    rows, streams, width = streams_TMC.shape
    tiles = triton.cdiv(width, _WIDTH)
    out_TMC = torch.empty_like(streams_TMC)
    numbers = torch.empty(rows, tiles, streams * (streams + 1), dtype=torch.float32, device=streams_TMC.device)
    dz_TC = out_TMC if written is None else streams_TMC.new_empty(rows, width)
    nothing = numbers
    if rows:
        _streams_gradient[(triton.cdiv(rows, _ROWS), tiles)](
            streams_TMC,
            nothing if grad_TMC is None else grad_TMC,
            *(
                (nothing,) * 8
                if read is None
                else (
                    read[0].pre_TM,
                    read[0].weight_C,
                    read[0].grad_TC,
                    read[0].alpha_T,
                    read[0].beta_T,
                    read[1].dp_TJ,
                    read[1].kappa_T,
                    read[1].fn_JE,
                )
            ),
            *(
                (nothing,) * 5
                if written is None
                else (
                    written.z_TC,
                    nothing if written.shared_TC is None else written.shared_TC,
                    written.streams_TMC,
                    written.post_TM,
                    written.comb_TMM,
                )
            ),
            out_TMC,
            dz_TC,
            numbers,
            rows,
            width,
            tiles,
            ABOVE=grad_TMC is not None,
            READS=read is not None,
            WRITES=written is not None,
            SHARED=written is not None and written.shared_TC is not None,
            STREAMS=streams,
            ROWS=_ROWS,
            WIDTH=_WIDTH,
            num_warps=4,
            enable_fp_fusion=False,
        )
    if written is None:
        return (out_TMC,)
    dpost_TM, dcomb = numbers.sum(dim=1).split([streams, streams * streams], dim=1)
    return dz_TC, out_TMC, dpost_TM.contiguous(), dcomb.reshape(rows, streams, streams)


@triton.jit(do_not_specialize=["rows"])
def _streams_gradient(
    streams_ptr, above_ptr, pre_ptr, weight_ptr, grad_ptr, alpha_ptr, beta_ptr, dp_ptr, kappa_ptr, fn_ptr, z_ptr,
    shared_ptr, old_ptr, post_ptr, comb_ptr, out_ptr, dz_ptr, numbers_ptr, rows, width, tiles,
    ABOVE: tl.constexpr, READS: tl.constexpr, WRITES: tl.constexpr, SHARED: tl.constexpr, STREAMS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    M: tl.constexpr = STREAMS
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    one, m = row[:, None], tl.arange(0, M)[None, :]
    here, inside = one < rows, channel[None, :] < width
    there, each = here & inside, here & (m >= 0)
    at = (row[:, None, None] * M + m[:, :, None]) * width + channel[None, None, :]
    whole = each[:, :, None] & inside[:, None, :]
    ds = tl.zeros([ROWS, M, WIDTH], tl.float32)
    if ABOVE:
        ds = tl.load(above_ptr + at, mask=whole, other=0.0).to(tl.float32)
    if READS:
        stream = tl.load(streams_ptr + at, mask=whole, other=0.0).to(tl.float32)
        pre = tl.load(pre_ptr + one * M + m, mask=each, other=0.0)[:, :, None]
        c = tl.sum(pre * stream, axis=1).to(DTYPE).to(tl.float32)
        grad = tl.load(grad_ptr + one * width + channel[None, :], mask=there, other=0.0).to(tl.float32)
        grad *= tl.load(weight_ptr + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        alpha = tl.load(alpha_ptr + one, mask=here, other=0.0)
        dc = alpha * grad - tl.load(beta_ptr + one, mask=here, other=0.0) * c
        ds += pre * dc[:, None, :] + tl.load(kappa_ptr + one, mask=here, other=0.0)[:, :, None] * stream
        fn_ptr += m[:, :, None] * width + channel[None, None, :]
        for j in range(M * M + 2 * M):
            fn = tl.load(fn_ptr + j * M * width, mask=(m >= 0)[:, :, None] & inside[:, None, :], other=0.0)
            ds += tl.load(dp_ptr + one * (M * M + 2 * M) + j, mask=here, other=0.0)[:, :, None] * fn
    if WRITES:
        z = tl.load(z_ptr + one * width + channel[None, :], mask=there, other=0.0).to(tl.float32)
        if SHARED:
            z += tl.load(shared_ptr + one * width + channel[None, :], mask=there, other=0.0).to(tl.float32)
        z = z.to(DTYPE).to(tl.float32)
        post = tl.load(post_ptr + one * M + m, mask=each, other=0.0)[:, :, None]
        tl.store(dz_ptr + one * width + channel[None, :], tl.sum(post * ds, axis=1).to(DTYPE), mask=there)
        numbers_ptr += (one * tiles + tl.program_id(1)) * (M * M + M) + m
        tl.store(numbers_ptr, tl.sum(ds * z[:, None, :], axis=2), mask=each)
        for source in tl.static_range(M):
            at_source = (one * M + source) * width + channel[None, :]
            old = tl.load(old_ptr + at_source, mask=there, other=0.0).to(tl.float32)
            tl.store(numbers_ptr + M + source * M, tl.sum(ds * old[:, None, :], axis=2), mask=each)
            comb = tl.load(comb_ptr + (one * M + source) * M + m, mask=each, other=0.0)[:, :, None]
            tl.store(out_ptr + at_source, tl.sum(comb * ds, axis=1).to(DTYPE), mask=there)
    else:
        tl.store(out_ptr + at, ds.to(DTYPE), mask=whole)
