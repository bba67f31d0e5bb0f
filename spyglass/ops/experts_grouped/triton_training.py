"""Kernels around the batched products of experts in training: rows spread, gated and summed; it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spyglass.ops.fake_quant.triton_kernel import round_blocks, rounding
from spyglass.quant.formats import FakeQuant

_SIZE = 1024


def spread_rows(
    x_TC: torch.Tensor,
    source_M: torch.Tensor,
    plain_MC: torch.Tensor | None,
    rounded_MC: torch.Tensor | None,
    quant: FakeQuant | None,
) -> None:
    """Row m becomes row `source_M[m]` of x (contiguous), 0 where that is no row: as it is, and rounded."""
    (tokens, width), outs = x_TC.shape, (plain_MC, rounded_MC)
    strides = [0 if out is None else out.stride(0) for out in outs]
    if len(source_M):
        _spread_rows[(len(source_M), triton.cdiv(width, _SIZE))](
            x_TC, source_M, *(x_TC if out is None else out for out in outs), *strides, tokens, width,
            PLAIN=plain_MC is not None, AGAIN=rounded_MC is not None, ROUNDS=quant is not None, SIZE=_SIZE,
            enable_fp_fusion=False, **rounding(quant, 32),
        )  # fmt: skip


@triton.jit
def _spread_rows(
    x_ptr, source_ptr, plain_ptr, again_ptr, plain_stride, again_stride, tokens, width,
    PLAIN: tl.constexpr, AGAIN: tl.constexpr, ROUNDS: tl.constexpr, E4M3: tl.constexpr, E4M3_SCALE: tl.constexpr,
    BLOCK: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    source = tl.load(source_ptr + row)
    there = channel < width
    x = tl.load(x_ptr + source * width + channel, mask=channel < tl.where(source < tokens, width, 0), other=0.0)
    if PLAIN:
        tl.store(plain_ptr + row * plain_stride + channel, x.to(plain_ptr.dtype.element_ty), mask=there)
    if AGAIN:
        if ROUNDS:
            x = tl.reshape(x.to(tl.float32), (SIZE // BLOCK, BLOCK))
            x = tl.reshape(round_blocks(x, E4M3, E4M3_SCALE), (SIZE,))
        tl.store(again_ptr + row * again_stride + channel, x.to(again_ptr.dtype.element_ty), mask=there)


def sum_rows(y_MC: torch.Tensor, place_TK: torch.Tensor, out_TC: torch.Tensor) -> None:
    """out_t = Σ_k y[place_tk] in fp32, in the order of k, without places that are no row; all contiguous."""
    (rows, width), (tokens, chosen) = y_MC.shape, place_TK.shape
    if tokens:
        _sum_rows[(tokens, triton.cdiv(width, _SIZE))](y_MC, place_TK, out_TC, rows, width, CHOSEN=chosen, SIZE=_SIZE)


@triton.jit
def _sum_rows(y_ptr, place_ptr, out_ptr, rows, width, CHOSEN: tl.constexpr, SIZE: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for k in tl.static_range(CHOSEN):
        place = tl.load(place_ptr + token * CHOSEN + k)
        there = channel < tl.where(place < rows, width, 0)
        y = tl.load(y_ptr + place * width + channel, mask=there, other=0.0)
        total += y.to(tl.float32)
    tl.store(out_ptr + token * width + channel, total.to(out_ptr.dtype.element_ty), mask=channel < width)


def gate_rows(
    gate_MF: torch.Tensor,
    up_MF: torch.Tensor,
    weight_N: torch.Tensor,
    choice_M: torch.Tensor,
    limit: float,
    z_MF: torch.Tensor,
    rounded_MF: torch.Tensor | None = None,
    quant: FakeQuant | None = None,
) -> None:
    """z = silu(min(gate, limit)) · clamp(up, ±limit) · weight[choice], 0 where a row has no choice; and z rounded.

    Channels contiguous. `rounded_MF` None: z only.
    """
    rows, width = gate_MF.shape
    if rows == 0:
        return
    _gate_rows[(rows, triton.cdiv(width, _SIZE))](
        gate_MF, up_MF, weight_N, choice_M, z_MF, z_MF if rounded_MF is None else rounded_MF,
        *(x.stride(0) for x in (gate_MF, up_MF, z_MF)), 0 if rounded_MF is None else rounded_MF.stride(0),
        len(weight_N), width, limit,
        AGAIN=rounded_MF is not None, ROUNDS=quant is not None, SIZE=_SIZE, enable_fp_fusion=False,
        **rounding(quant, 32),
    )  # fmt: skip


@triton.jit
def _gate_rows(
    gate_ptr, up_ptr, weight_ptr, choice_ptr, z_ptr, again_ptr, gate_stride, up_stride, z_stride, again_stride, choices,
    width, limit,
    AGAIN: tl.constexpr, ROUNDS: tl.constexpr, E4M3: tl.constexpr, E4M3_SCALE: tl.constexpr, BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    there = channel < width
    choice = tl.load(choice_ptr + row)
    weight = tl.load(weight_ptr + tl.where(choice < choices, choice, 0))
    weight = tl.where(choice < choices, weight, 0.0)
    gate = tl.load(gate_ptr + row * gate_stride + channel, mask=there, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + channel, mask=there, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL), -limit, propagate_nan=tl.PropagateNan.ALL)
    z = (gate / (1 + tl.exp(-gate)) * up * weight).to(z_ptr.dtype.element_ty)
    tl.store(z_ptr + row * z_stride + channel, z, mask=there)
    if AGAIN:
        z = z.to(tl.float32)
        if ROUNDS:
            z = tl.reshape(z, (SIZE // BLOCK, BLOCK))
            z = tl.reshape(round_blocks(z, E4M3, E4M3_SCALE), (SIZE,))
        tl.store(again_ptr + row * again_stride + channel, z.to(again_ptr.dtype.element_ty), mask=there)


def gate_gradient(
    gate_MF: torch.Tensor,
    up_MF: torch.Tensor,
    weight_N: torch.Tensor | None,
    choice_M: torch.Tensor,
    limit: float,
    dz_MF: torch.Tensor,
    dgate_MF: torch.Tensor,
    dup_MF: torch.Tensor,
    dweight_M: torch.Tensor | None,
) -> None:
    """Gradients of `gate_rows`; where a clamp bites they are 0, at the limit itself they pass. Channels contiguous."""
    rows, width = gate_MF.shape
    if rows == 0:
        return
    _gate_gradient[(rows,)](
        gate_MF, up_MF, gate_MF if weight_N is None else weight_N, choice_M, dz_MF, dgate_MF, dup_MF,
        gate_MF if dweight_M is None else dweight_M, *(x.stride(0) for x in (gate_MF, up_MF, dz_MF, dgate_MF, dup_MF)),
        0 if weight_N is None else len(weight_N), width, limit,
        WEIGHTED=weight_N is not None, OF_WEIGHT=dweight_M is not None, SIZE=_SIZE, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _gate_gradient(
    gate_ptr, up_ptr, weight_ptr, choice_ptr, dz_ptr, dgate_ptr, dup_ptr, dweight_ptr, gate_stride, up_stride,
    dz_stride, dgate_stride, dup_stride, choices, width, limit,
    WEIGHTED: tl.constexpr, OF_WEIGHT: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight = 1.0
    if WEIGHTED:
        choice = tl.load(choice_ptr + row)
        weight = tl.load(weight_ptr + tl.where(choice < choices, choice, 0))
        weight = tl.where(choice < choices, weight, 0.0)
    total = tl.zeros([SIZE], tl.float32)
    for first in range(0, width, SIZE):
        channel = first + tl.arange(0, SIZE)
        there = channel < width
        gate = tl.load(gate_ptr + row * gate_stride + channel, mask=there, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row * up_stride + channel, mask=there, other=0.0).to(tl.float32)
        dz = tl.load(dz_ptr + row * dz_stride + channel, mask=there, other=0.0).to(tl.float32)
        low, bound = tl.minimum(gate, limit), tl.maximum(tl.minimum(up, limit), -limit)
        share = 1 / (1 + tl.exp(-low))
        silu = low * share
        dgate = dz * weight * bound * (share * (1 + low * (1 - share)))
        dup = dz * weight * silu
        dgate = tl.where(gate <= limit, dgate, 0.0)
        dup = tl.where((up >= -limit) & (up <= limit), dup, 0.0)
        tl.store(dgate_ptr + row * dgate_stride + channel, dgate.to(dgate_ptr.dtype.element_ty), mask=there)
        tl.store(dup_ptr + row * dup_stride + channel, dup.to(dup_ptr.dtype.element_ty), mask=there)
        if OF_WEIGHT:
            total += dz * silu * bound
    if OF_WEIGHT:
        tl.store(dweight_ptr + row, tl.sum(total, axis=0))
