"""Nibbles and scale bytes: the parts of a format that are only a change of representation.

Spec v4 2.4. An e8m0 byte u means 2^(u - 127), 255 is NaN. An e2m1 code is a sign bit and an index into
0, 0.5, 1, 1.5, 2, 3, 4, 6; two codes share a byte, the even input in the low nibble.
"""

from __future__ import annotations

import torch

E8M0_NAN = 255


def e8m0_to_float(scale: torch.Tensor) -> torch.Tensor:
    """Scale bytes (uint8, any shape) to float32 powers of two; byte 0 is the subnormal 2^-127, byte 255 NaN."""
    bits = scale.to(torch.int32) << 23
    bits = torch.where(scale == 0, torch.full_like(bits, 0x00400000), bits)
    bits = torch.where(scale == E8M0_NAN, torch.full_like(bits, 0x7FC00000), bits)
    return bits.view(torch.float32)


def e8m0_from_exponent(exponent: torch.Tensor) -> torch.Tensor:
    """Integer exponents to scale bytes (uint8), clamped to what a byte can say: -127..127."""
    return (exponent.clamp(-127, 127) + 127).to(torch.uint8)


def unpack_e2m1(data: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Packed bytes (uint8 [..., n]) to unscaled values ([..., 2n], `dtype`), low nibble first."""
    byte = torch.arange(256, device=data.device)
    # the values of the codes 0..7 in quarters, made where the data is: a captured graph copies nothing from the host
    code = byte[:16] & 7
    quarters = torch.where(code < 2, 2 * code, (2 + (code & 1)) << (code >> 1))
    values = quarters.to(dtype) * 0.25
    values = torch.where(byte[:16] < 8, values, -values)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)
    whole = {2: torch.int32, 4: torch.int64}[dtype.itemsize]  # both values in one piece
    found = pairs.view(whole)[:, 0].index_select(0, data.flatten().to(torch.int32))
    return found.view(dtype).view(*data.shape[:-1], 2 * data.shape[-1])


def pack_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Values that are exactly e2m1 ([..., 2n] float32, signed zero kept) to packed bytes (uint8 [..., n])."""
    size = values.abs()
    index = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4)).nan_to_num(7.0)
    codes = index.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
