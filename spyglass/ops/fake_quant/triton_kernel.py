"""The kernel behind `triton.py`; importing it needs Triton.

Rounding works on the numbers themselves, not on codes, so that it needs no 8-bit type of the GPU: adding and
subtracting 1.5 · 2^23 grid steps rounds to nearest, ties to even. By a power of two nothing is divided; the grid is
scaled instead.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from spyglass.ops.gpu import overlap
from spyglass.ops.overlap import begin
from spyglass.quant.formats import FakeQuant

_VALUES = 2048  # of a program


def quantise_rows(x_ND: torch.Tensor, out_ND: torch.Tensor, spec: FakeQuant, dims: int, tail_bf16: bool) -> None:
    """Write fake_quant of the rows of x (channels contiguous) into `out_ND` (contiguous)."""
    rows, width = x_ND.shape
    if out_ND.numel() == 0:
        return
    rounded, plain = triton.cdiv(dims, spec.block), triton.cdiv(width - dims, spec.block)
    BLOCK = triton.next_power_of_2(spec.block)
    BLOCKS = max(_VALUES // BLOCK, 1)
    _quantise[(triton.cdiv(rows * (rounded + plain), BLOCKS),)](
        x_ND, out_ND, rows * (rounded + plain), x_ND.stride(0), width, dims, rounded, rounded + plain, spec.block,
        E4M3=spec.element == "e4m3", E4M3_SCALE=spec.scale == "e4m3", TAIL_BF16=tail_bf16, BLOCK=BLOCK, BLOCKS=BLOCKS,
        enable_fp_fusion=False, **overlap(x_ND),
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _quantise(
    x_ptr, out_ptr, count, row_stride, width, dims, rounded, blocks, block,
    E4M3: tl.constexpr, E4M3_SCALE: tl.constexpr, TAIL_BF16: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """A row is `rounded` blocks of the first `dims` channels, then blocks that pass, `blocks` in all."""
    begin(OVERLAPS)
    index = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    row, place = index // blocks, (index % blocks).to(tl.int32)
    passes = place >= rounded
    first = tl.where(passes, dims + (place - rounded) * block, place * block)
    inside = tl.arange(0, BLOCK)[None, :]
    channel = first + inside
    there = (index < count) & (inside < block) & (channel < tl.where(passes, width, dims))
    x = tl.load(x_ptr + row * row_stride + channel, mask=there, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(x), axis=1)[:, None]
    tail = to_bf16(x) if TAIL_BF16 else x
    out = tl.where(passes, tail, round_block(x, amax, E4M3, E4M3_SCALE))
    tl.store(out_ptr + row * width + channel, out.to(out_ptr.dtype.element_ty), mask=there)


def rounding(quant: FakeQuant | None, block: int = 0) -> dict[str, Any]:
    """Constants of a kernel that rounds on its way out; where it does not, BLOCK is `block`."""
    if quant is None:
        return {"BLOCK": block, "E4M3": False, "E4M3_SCALE": False}
    return {"BLOCK": quant.block, "E4M3": quant.element == "e4m3", "E4M3_SCALE": quant.scale == "e4m3"}


@triton.jit
def round_blocks(x, E4M3: tl.constexpr, E4M3_SCALE: tl.constexpr) -> tl.tensor:
    """Rows of x [N, BLOCK], fp32, each a block."""
    return round_block(x, tl.max(tl.abs(x), axis=1)[:, None], E4M3, E4M3_SCALE)


@triton.jit
def round_block(x, amax, E4M3: tl.constexpr, E4M3_SCALE: tl.constexpr) -> tl.tensor:
    """fp32 values to what they are stored as, in blocks whose largest magnitude is `amax` (it broadcasts against x)."""
    TOP: tl.constexpr = 448.0 if E4M3 else 6.0
    LOW: tl.constexpr = 0.015625 if E4M3 else 1.0  # smallest normal number
    FRACTION: tl.constexpr = 3 if E4M3 else 1
    if E4M3_SCALE:
        scale = number_scale(amax)
        code = tl.minimum(tl.maximum(tl.div_rn(x, scale), -TOP), TOP)
        return tl.where(x == x, to_grid(code, LOW, FRACTION) * scale, x)
    scale = power_scale(amax, E4M3)
    bounded = tl.minimum(tl.maximum(x, -TOP * scale), TOP * scale)
    return tl.where(x == x, to_grid(bounded, LOW * scale, FRACTION), x)


@triton.jit
def power_scale(amax, E4M3: tl.constexpr) -> tl.tensor:
    """2^⌈log2(max(amax, floor) · fp32(1 / top))⌉, from the bits."""
    if E4M3:
        product = tl.maximum(amax, 1e-4) * (1.0 / 448.0)
    else:
        product = tl.maximum(amax, 7.0527842e-38) * (1.0 / 6.0)  # 6 · 2^-126
    bits = product.to(tl.int32, bitcast=True)
    return (((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def number_scale(amax) -> tl.tensor:
    """e4m3(max(amax, 6 · 2^-9) / 6)."""
    sixth = tl.div_rn(tl.maximum(amax, 0.01171875), tl.full(amax.shape, 6.0, tl.float32))
    return to_grid(tl.minimum(sixth, 448.0), 0.015625, 3)


@triton.jit
def block_codes(x, E4M3: tl.constexpr, E4M3_SCALE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """fp32 blocks x [.., BLOCK] to numbers of the element and the byte of each block's scale (int32).

    A block with a value that is no number, or infinite where scales are powers of two, gets the scale that is none.
    """
    size = tl.abs(x)
    amax = tl.max(size, axis=2)
    rounded = round_block(x, amax[:, :, None], E4M3, E4M3_SCALE)
    if E4M3_SCALE:
        scale = number_scale(amax)
        bad = tl.max((size != size).to(tl.int32), axis=2)
        return tl.div_rn(rounded, tl.broadcast_to(scale[:, :, None], x.shape)), code_bits(scale, True) | (bad * 127)
    else:
        power = power_scale(amax, E4M3).to(tl.int32, bitcast=True) >> 23
        inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
        bad = tl.max((size - size != 0).to(tl.int32), axis=2)
        return rounded * inverse[:, :, None], power | (bad * 255)


@triton.jit
def code_bits(number, E4M3: tl.constexpr) -> tl.tensor:
    """fp32 numbers of the element, e4m3 or e2m1, to its codes (int32)."""
    FRACTION: tl.constexpr = 3 if E4M3 else 1
    LOW: tl.constexpr = 0.015625 if E4M3 else 1.0  # smallest normal number
    SIGN: tl.constexpr = 7 if E4M3 else 3
    bits = number.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    small = (tl.abs(number) * ((1 << FRACTION) / LOW)).to(tl.int32)
    normal = (magnitude >> (23 - FRACTION)) - ((120 if E4M3 else 126) << FRACTION)
    code = tl.where(tl.abs(number) < LOW, small, normal) & ((1 << SIGN) - 1)
    return code | (((bits >> 31) & 1) << SIGN)


@triton.jit
def to_grid(x, low, FRACTION: tl.constexpr) -> tl.tensor:
    """x to `FRACTION` bits behind its leading one, but no finer than a number of the size of `low` has; |x| < 2^100."""
    bits = x.to(tl.int32, bitcast=True)
    power = tl.maximum((bits & 0x7F800000).to(tl.float32, bitcast=True), low)
    magic = power.to(tl.int32, bitcast=True) + (((23 - FRACTION) << 23) | 0x400000)
    magic = magic.to(tl.float32, bitcast=True)
    value = ((x + magic) - magic).to(tl.int32, bitcast=True)
    return (bits ^ ((bits ^ value) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)  # the sign of a zero stays


@triton.jit
def to_bf16(x) -> tl.tensor:
    """fp32 values rounded to the nearest bf16 number, ties to even, from the bits (the interpreter's cast cuts off)."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
