"""Rows of codes inside Triton kernels: fetched, decoded in registers, written; importing it needs Triton.

ROW is `stored.row_code`. A code times its scale is a bf16 number, so what is decoded has the bits of a plain row. A
scale byte of no number makes its whole block so, whatever the codes are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from spyglass.ops.fake_quant.triton_kernel import block_codes, code_bits, to_bf16


@triton.jit
def fetch_codes(rows_ptr, at, ok, ROW: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Bytes of codes and of scales, and bf16 channels, of rows `at` [N] (int64); zeros where not `ok`."""
    E4M3: tl.constexpr = ROW & 1
    BLOCK: tl.constexpr = (ROW >> 2) & 4095
    DIMS: tl.constexpr = (ROW >> 14) & 4095
    TAIL_AT: tl.constexpr = (ROW >> 26) & 4095
    SCALES_AT: tl.constexpr = (ROW >> 38) & 4095
    ROW_BYTES: tl.constexpr = ROW >> 50
    BYTES: tl.constexpr = BLOCK if E4M3 else BLOCK // 2
    BLOCKS: tl.constexpr = DIM // BLOCK
    block = tl.arange(0, BLOCKS)[None, :]
    row_ptr = rows_ptr + at[:, None] * ROW_BYTES
    there = ok[:, None] & (block < DIMS // BLOCK)
    scale = tl.load(row_ptr + SCALES_AT + block, mask=there, other=0)
    place = (block * BYTES)[:, :, None] + tl.arange(0, BYTES)[None, None, :]
    codes = tl.load(row_ptr[:, :, None] + place, mask=there[:, :, None], other=0)
    tail = codes
    if DIMS < DIM:
        place = (block * BLOCK)[:, :, None] + tl.arange(0, BLOCK)[None, None, :] - DIMS
        tail_ptr = (row_ptr + TAIL_AT).to(tl.pointer_type(tl.bfloat16))[:, :, None]
        behind = ok[:, None] & (block >= DIMS // BLOCK)
        tail = tl.load(tail_ptr + place, mask=behind[:, :, None], other=0.0)
    return codes, scale, tail


@triton.jit
def decode_codes(fetched, ROW: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """What `fetch_codes` brought as numbers [N, DIM]."""
    E4M3: tl.constexpr = ROW & 1
    BLOCK: tl.constexpr = (ROW >> 2) & 4095
    DIMS: tl.constexpr = (ROW >> 14) & 4095
    codes, scale, tail = fetched
    if E4M3:
        value = e4m3_value(codes)
    else:
        value = tl.reshape(tl.join(e2m1_value(codes), e2m1_value(codes >> 4)), (N, DIM // BLOCK, BLOCK))
    value = (value * scale_value(scale, ROW)[:, :, None]).to(DTYPE)
    if DIMS < DIM:
        block = tl.arange(0, DIM // BLOCK)[None, :, None]
        value = tl.where(block < DIMS // BLOCK, value, tail.to(DTYPE))
    return tl.reshape(value, (N, DIM))


@triton.jit
def e4m3_value(code) -> tl.tensor:
    """Bytes of e4m3 to fp32; by the bits of fp16 numbers, 2^-8 of them, where the GPU has no such type."""
    if cuda_capability_geq(8, 9):
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = code.to(tl.int16)
        half = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True)
        return half.to(tl.float32) * 256.0


@triton.jit
def e2m1_value(code) -> tl.tensor:
    """The low nibbles of bytes, e2m1, to fp32: by the bits of fp16 numbers, 2^-14 of them."""
    bits = code.to(tl.int16)
    half = (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


@triton.jit
def scale_value(byte, ROW: tl.constexpr) -> tl.tensor:
    """Scale bytes to fp32. A byte 0 of e8m0, which is never written, counts as 0."""
    if ROW & 2:
        return tl.where((byte & 127) == 127, float("nan"), e4m3_value(byte))
    else:
        bits = byte.to(tl.int32) << 23
        return tl.where(byte == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def write_codes(x, rows_ptr, at, ok, ROW: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr) -> None:
    """Rows x [N, DIM], fp32 before rounding, to rows `at` [N] where `ok`."""
    E4M3: tl.constexpr = ROW & 1
    BLOCK: tl.constexpr = (ROW >> 2) & 4095
    DIMS: tl.constexpr = (ROW >> 14) & 4095
    TAIL_AT: tl.constexpr = (ROW >> 26) & 4095
    SCALES_AT: tl.constexpr = (ROW >> 38) & 4095
    ROW_BYTES: tl.constexpr = ROW >> 50
    SCALES_END: tl.constexpr = SCALES_AT + DIMS // BLOCK
    row_ptr = rows_ptr + at[:, None] * ROW_BYTES
    ok = ok[:, None]
    number, scale = block_codes(tl.reshape(x, (N, DIM // BLOCK, BLOCK)), E4M3, ROW & 2)
    block = tl.arange(0, DIM // BLOCK)[None, :]
    tl.store(row_ptr + SCALES_AT + block, scale.to(tl.uint8), mask=ok & (block < DIMS // BLOCK))
    bits = code_bits(tl.reshape(number, (N, DIM)), E4M3)
    channel = tl.arange(0, DIM)[None, :]
    if E4M3:
        tl.store(row_ptr + channel, bits.to(tl.uint8), mask=ok & (channel < DIMS))
    else:
        low, high = tl.split(tl.reshape(bits, (N, DIM // 2, 2)))
        pair = tl.arange(0, DIM // 2)[None, :]
        tl.store(row_ptr + pair, (low | (high << 4)).to(tl.uint8), mask=ok & (pair < DIMS // 2))
    if DIMS < DIM:
        tail_ptr = (row_ptr + TAIL_AT).to(tl.pointer_type(tl.int16))
        half = to_bf16(x).to(tl.int32, bitcast=True) >> 16
        tl.store(tail_ptr + channel - DIMS, half.to(tl.int16), mask=ok & (channel >= DIMS))
    if SCALES_END < ROW_BYTES:
        filling = SCALES_END + tl.arange(0, 4)[None, :]
        tl.store(row_ptr + filling, tl.zeros((N, 4), tl.uint8), mask=ok & (filling < ROW_BYTES))
