"""Kernels around the products of training, beside torch's own matrix product; importing it needs Triton.

A product in bf16 is exact up to the order of its sum where its factors are bf16 numbers. What a rank row adds is fp32,
so fp32 factors are cut into three bf16 numbers p1 + p2 + p3, exactly, and the six largest of the nine products of their
parts are further columns of one product: [x | u] [W | b]ᵀ = x Wᵀ + u bᵀ, summed in fp32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spyglass.ops.fake_quant.triton_kernel import round_blocks, rounding, to_bf16
from spyglass.ops.gpu import interpreted
from spyglass.quant.formats import FakeQuant, Format

EACH, LEFT, RIGHT = 0, 1, 2  # all parts once; the parts that columns of a left factor have, and of a right one
_TILE = 64


def parts(kind: int) -> int:
    """How many columns one fp32 number takes: as it is when interpreted, where nothing is bf16."""
    return 1 if interpreted() else 3 if kind == EACH else 6


def round_into(x_NI: torch.Tensor, out_NI: torch.Tensor, quant: FakeQuant | None) -> None:
    """Write `fake_quant` of the rows of x (channels contiguous) into the rows of `out_NI` (the same)."""
    rows, width = x_NI.shape
    if x_NI.numel() == 0:
        return
    constants = rounding(quant, 32)
    _round_into[(rows, triton.cdiv(width, 1024))](
        x_NI, out_NI, x_NI.stride(0), out_NI.stride(0), width,
        ROUNDS=quant is not None, SIZE=max(1024, constants["BLOCK"]), enable_fp_fusion=False, **constants,
    )  # fmt: skip


@triton.jit
def _round_into(
    x_ptr, out_ptr, x_stride, out_stride, width,
    ROUNDS: tl.constexpr, E4M3: tl.constexpr, E4M3_SCALE: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + row * x_stride + channel, mask=channel < width, other=0.0)
    if ROUNDS:
        x = tl.reshape(x.to(tl.float32), (SIZE // BLOCK, BLOCK))
        x = tl.reshape(round_blocks(x, E4M3, E4M3_SCALE), (SIZE,))
    tl.store(out_ptr + row * out_stride + channel, x.to(out_ptr.dtype.element_ty), mask=channel < width)


def decode_into(
    data: torch.Tensor,
    scale: torch.Tensor | None,
    format: Format,
    out_GOI: torch.Tensor,
    chosen_G: torch.Tensor | None = None,
) -> None:
    """Write the numbers of stacked matrices `data` [E, out, stored] into `out_GOI`, rows contiguous.

    Matrix g is number `chosen_G[g]` of the stack, or g. FP4, and FP8 with e8m0 scales; inputs a multiple of 32.
    """
    count, outputs, inputs = out_GOI.shape
    if out_GOI.numel() == 0:
        return
    assert scale is not None and format.block is not None and inputs % 32 == 0
    ROWS, SIZE = 16, 256
    _decode_into[(triton.cdiv(outputs, ROWS) * triton.cdiv(inputs, SIZE), count)](
        data.view(torch.uint8), scale.view(torch.uint8), out_GOI, out_GOI if chosen_G is None else chosen_G, outputs,
        inputs, data.stride(0), scale.stride(0), scale.shape[-1], out_GOI.stride(0), out_GOI.stride(1),
        CHOSEN=chosen_G is not None, FP4=format.name == "fp4", BLOCK_O=format.block[0], BLOCK_I=format.block[1],
        ROWS=ROWS, SIZE=SIZE, num_warps=4,
    )  # fmt: skip


@triton.jit
def _decode_into(
    data_ptr, scale_ptr, out_ptr, chosen_ptr, outputs, inputs, data_batch, scale_batch, scales, out_batch, out_stride,
    CHOSEN: tl.constexpr, FP4: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, ROWS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.cdiv(inputs, SIZE)
    row = (tl.program_id(0) // columns * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    first = tl.program_id(0) % columns * SIZE
    g = tl.program_id(1).to(tl.int64)
    e = tl.load(chosen_ptr + g).to(tl.int64) if CHOSEN else g
    data_ptr += e * data_batch
    if FP4:
        half = first // 2 + tl.arange(0, SIZE // 2)[None, :]
        byte = tl.load(data_ptr + row * (inputs // 2) + half, mask=(row < outputs) & (half < inputs // 2), other=0)
        code = tl.interleave(byte & 15, byte >> 4).to(tl.int16)
        value = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    else:
        channel = first + tl.arange(0, SIZE)[None, :]
        code = tl.load(data_ptr + row * inputs + channel, mask=(row < outputs) & (channel < inputs), other=0)
        code = code.to(tl.int16)
        value = (((code & 128) << 8) | ((code & 127) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where((code & 127) == 127, float("nan"), value)
    group = first // 32 + tl.arange(0, SIZE // 32)[None, :]
    place = e * scale_batch + row // BLOCK_O * scales + group * 32 // BLOCK_I
    power = tl.load(scale_ptr + place, mask=(row < outputs) & (group * 32 < inputs), other=127).to(tl.int32)
    # 2^(power - 127) in two factors that are normal numbers
    small = power < 64
    one = ((tl.where(small, power + 64, power)) << 23).to(tl.float32, bitcast=True)
    one = tl.where(power == 255, float("nan"), one)
    one = tl.where(small, one * 5.421010862427522e-20, one)  # 2^-64
    value = tl.reshape(tl.reshape(value, (ROWS, SIZE // 32, 32)) * one[:, :, None], (ROWS, SIZE))
    channel = first + tl.arange(0, SIZE)[None, :]
    to = out_ptr + g * out_batch + row * out_stride + channel
    tl.store(to, value.to(out_ptr.dtype.element_ty), mask=(row < outputs) & (channel < inputs))


def place_parts(
    source_GNR: torch.Tensor,
    out_GNRt: torch.Tensor,
    kind: int,
    *,
    sums: int = 1,
    scale_GR: torch.Tensor | None = None,
    adapter_ids: tuple[torch.Tensor, torch.Tensor] | None = None,
    value_GNR: torch.Tensor | None = None,
) -> None:
    """Write parts of fp32 numbers into `out_GNRt` [G, N, R, parts(kind)], a view with any strides.

    The numbers are those of `source_GNR` [G, N, sums · R]: `sums` columns R apart are added, then times `scale_GR`,
    then 0 where row n and rank r are not of one adapter (`adapter_ids` of both). `value_GNR` (contiguous) takes them
    whole.
    """
    count, rows, ranks, columns = out_GNRt.shape
    if out_GNRt.numel() == 0:
        return
    assert columns == parts(kind) and source_GNR.shape == (count, rows, sums * ranks)
    RANKS = min(triton.next_power_of_2(ranks), 16)
    adapter_N, adapter_R = adapter_ids or (source_GNR, source_GNR)
    _place_parts[(triton.cdiv(rows, _TILE), triton.cdiv(ranks, RANKS), count)](
        source_GNR, out_GNRt, source_GNR if value_GNR is None else value_GNR,
        source_GNR if scale_GR is None else scale_GR, adapter_N, adapter_R, rows, ranks, *source_GNR.stride(),
        *out_GNRt.stride(),
        SUMS=sums, SCALED=scale_GR is not None, MASKED=adapter_ids is not None, WHOLE=value_GNR is not None, KIND=kind,
        PARTS=columns, ROWS=_TILE, RANKS=RANKS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _place_parts(
    source_ptr, out_ptr, value_ptr, scale_ptr, adapter_n_ptr, adapter_r_ptr, rows, ranks, source_g, source_n, source_r,
    out_g, out_n, out_r, out_t,
    SUMS: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr, KIND: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
) -> None:  # fmt: skip
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    r = (tl.program_id(1) * RANKS + tl.arange(0, RANKS))[None, :].to(tl.int64)
    g = tl.program_id(2).to(tl.int64)
    there = (n < rows) & (r < ranks)
    value = tl.zeros([ROWS, RANKS], tl.float32)
    for s in tl.static_range(SUMS):
        source = source_ptr + g * source_g + n * source_n + (s * ranks + r) * source_r
        value += tl.load(source, mask=there, other=0.0).to(tl.float32)
    if SCALED:
        value *= tl.load(scale_ptr + g * ranks + r, mask=r < ranks, other=0.0)
    if MASKED:
        own = tl.load(adapter_n_ptr + n, mask=n < rows, other=0) == tl.load(adapter_r_ptr + r, mask=r < ranks, other=0)
        value = tl.where(own, value, 0.0)
    if WHOLE:
        tl.store(value_ptr + (g * rows + n) * ranks + r, value, mask=there)
    to = out_ptr + g * out_g + n * out_n + r * out_r
    if PARTS == 1:
        tl.store(to, value.to(out_ptr.dtype.element_ty), mask=there)
    else:
        p1 = to_bf16(value)
        p2 = to_bf16(value - p1)
        p3 = to_bf16(value - p1 - p2)
        for t in tl.static_range(PARTS):  # left 1 1 2 1 2 3, right 1 2 1 3 2 1
            if (KIND == 0 and t == 0) or (KIND == 1 and (t == 0 or t == 1 or t == 3)):
                part = p1
            elif KIND == 2 and (t == 0 or t == 2 or t == 5):
                part = p1
            elif (KIND == 0 and t == 1) or (KIND == 1 and (t == 2 or t == 4)) or (KIND == 2 and (t == 1 or t == 4)):
                part = p2
            else:
                part = p3
            tl.store(to + t * out_t, part.to(out_ptr.dtype.element_ty), mask=there)
