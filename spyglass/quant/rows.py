"""The arithmetic of stored rows: activations to codes and scales (spec v4 2.5, v41 4.1), and back.

A code times its scale is a bf16 number, so reading a stored row is exact: it has the values that rounding would have
left in a plain one. A block with a value that is no number (or infinite, where scales are powers of two) reads as NaN.
"""

from __future__ import annotations

import torch

from spyglass.quant.codec import E2M1_MAX, E4M3_MAX, ceil_pow2_scale, round_e2m1, round_e4m3
from spyglass.quant.formats import FakeQuant, StoredRow
from spyglass.quant.pack import E8M0_NAN, e8m0_to_float, pack_e2m1, unpack_e2m1

_FLOOR = {"e4m3": 1e-4, "e2m1": 6 * 2.0**-126}
_TOP = {"e4m3": E4M3_MAX, "e2m1": E2M1_MAX}


def code_and_scale(x: torch.Tensor, spec: FakeQuant) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of fp32 values along the last axis to values of the element and one scale each, all fp32.

    e8m0: σ = 2^⌈log2(max(amax, floor) · fp32(1 / top))⌉; e4m3 (scale): σ = e4m3(max(amax, 6 · 2^-9) / 6).
    """
    top, amax = _TOP[spec.element], x.abs().amax(dim=-1, keepdim=True)
    if spec.scale == "e8m0":
        scale = ceil_pow2_scale(amax.clamp(min=_FLOOR[spec.element]), 1.0 / top)
    else:
        scale = round_e4m3((amax.clamp(min=6 * 2.0**-9) / 6).clamp(max=E4M3_MAX))
    code = (x / scale).clamp(-top, top)
    return round_e4m3(code) if spec.element == "e4m3" else round_e2m1(code), scale


def encode_rows(x_ND: torch.Tensor, format: StoredRow) -> torch.Tensor:
    """Rows of `format.dim` channels before rounding, any float dtype, to uint8 [..., format.row_bytes]."""
    quant, head = format.quant, x_ND[..., : format.dims].float()
    codes, scales = [head[..., :0]], []
    for block in head.split(quant.block, dim=-1) if format.dims else ():
        code, scale = code_and_scale(block, quant)
        codes.append(code)
        if quant.scale == "e4m3":
            scales.append(scale.to(torch.float8_e4m3fn).view(torch.uint8))
        else:
            byte = scale.view(torch.int32) >> 23
            scales.append(torch.where(block.isfinite().all(-1, keepdim=True), byte, E8M0_NAN).to(torch.uint8))
    numbers = torch.cat(codes, dim=-1)
    if quant.element == "e4m3":
        stored = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        stored = pack_e2m1(torch.nn.functional.pad(numbers, (0, format.dims % 2)))
    row_NB = x_ND.new_zeros(*x_ND.shape[:-1], format.row_bytes, dtype=torch.uint8)
    row_NB[..., : stored.shape[-1]] = stored
    if format.dim > format.dims:
        row_NB[..., format.tail_at : format.scales_at] = x_ND[..., format.dims :].bfloat16().view(torch.uint8)
    if scales:
        row_NB[..., format.scales_at : format.scales_at + format.blocks] = torch.cat(scales, dim=-1)
    return row_NB


def decode_rows(rows_NB: torch.Tensor, format: StoredRow, dtype: torch.dtype) -> torch.Tensor:
    """What `encode_rows` stored, [..., format.dim] in `dtype` (bf16 or wider: exact)."""
    quant, codes = format.quant, rows_NB[..., : format.tail_at]
    scale = rows_NB[..., format.scales_at : format.scales_at + format.blocks]
    head = codes.view(torch.float8_e4m3fn).float() if quant.element == "e4m3" else unpack_e2m1(codes)
    factors = scale.view(torch.float8_e4m3fn).float() if quant.scale == "e4m3" else e8m0_to_float(scale)
    factors = factors.repeat_interleave(quant.block, dim=-1)[..., : format.dims]
    values_ND = (head[..., : format.dims] * factors).to(dtype)
    if format.dim == format.dims:
        return values_ND
    tail = rows_NB[..., format.tail_at : format.scales_at].clone(memory_format=torch.contiguous_format)
    return torch.cat([values_ND, tail.view(torch.bfloat16).to(dtype)], dim=-1)


def read_rows(rows_NX: torch.Tensor, format: StoredRow | None, dtype: torch.dtype) -> torch.Tensor:
    """Rows of the cache as numbers of `dtype`: bytes are rows of `format`, everything else are plain rows."""
    if rows_NX.dtype != torch.uint8:
        return rows_NX.to(dtype)
    assert format is not None, "rows are bytes, of no format"
    return decode_rows(rows_NX, format, dtype)
