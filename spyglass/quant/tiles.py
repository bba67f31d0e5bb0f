"""FP4 weights in the order in which GPU kernels read them: as many bytes, and back without loss.

Tiles of 16 rows and 128 inputs lie one after the other, in a tile the 64 bytes of a row after those of the one before.
Sixteen bytes hold the 32 inputs of a scale as four 32-bit words; word q has the codes 8 p + 2 q + h (p 0 to 3, h 0 or
1) so that few operations bring each pair h to the bits of two bf16 numbers. A scale word of four bytes belongs to a
lane of four: the scales of input 32 lane + 128 step, step 0 to 3.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from spyglass.quant.packed import Packed

# p, h, and where the bits 3 (sign), 2, 1, 0 of that code lie in its word
_PLACES = (
    (0, 0, 15, 8, 7, 6),
    (0, 1, 31, 24, 23, 22),
    (1, 0, 9, 2, 1, 0),
    (1, 1, 25, 18, 17, 16),
    (2, 0, 19, 12, 11, 10),
    (2, 1, 3, 28, 27, 26),
    (3, 0, 5, 30, 29, 4),
    (3, 1, 21, 14, 13, 20),
)


def can_tile(weight: Packed) -> bool:
    """FP4 with rows in sixteens and inputs in 512s, not tiled yet."""
    return weight.format.name == "fp4" and not weight.tiled and not weight.shape[-2] % 16 and not weight.shape[-1] % 512


def tile(weight: Packed) -> Packed:
    """The same weight, tiled."""
    assert can_tile(weight) and weight.scale is not None
    byte = torch.arange(256, device=weight.data.device)
    bytes_ = weight.data.unflatten(-1, (-1, 4, 4)).to(torch.int32)  # [.., N, group, p, q]: one byte is one pair h
    word = torch.zeros(bytes_[..., 0, :].shape, dtype=torch.int32, device=weight.data.device)
    for p in range(4):
        table = torch.zeros(256, dtype=torch.int64, device=weight.data.device)
        for value, half, *places in _PLACES:
            if value == p:
                for bit, place in zip((3, 2, 1, 0), places, strict=True):
                    table |= (byte >> (4 * half + bit) & 1) << place
        word |= _signed(table)[bytes_[..., p, :]]
    data = _to_tiles(word.flatten(-2).view(torch.uint8), 64).view(weight.data.shape)
    scale = weight.scale.unflatten(-1, (-1, 4, 4)).transpose(-1, -2).flatten(-3)
    return replace(weight, data=data, scale=_to_tiles(scale, 16).view(weight.scale.shape), tiled=True)


def untile(weight: Packed) -> Packed:
    """A tiled weight as a file holds it."""
    assert weight.tiled and weight.scale is not None
    word = _from_tiles(weight.data, 64).contiguous().view(torch.int32).unflatten(-1, (-1, 4))  # [.., N, group, q]
    pairs = [torch.zeros_like(word) for _ in range(4)]
    for p, half, *places in _PLACES:
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            pairs[p] |= (word >> place & 1) << (4 * half + bit)
    data = torch.stack(pairs, -2).to(torch.uint8).flatten(-3)
    scale = _from_tiles(weight.scale, 16).unflatten(-1, (-1, 4, 4)).transpose(-1, -2).flatten(-3)
    return replace(weight, data=data, scale=scale.contiguous(), tiled=False)


def _signed(table: torch.Tensor) -> torch.Tensor:
    """Numbers below 2^32 as the int32 of the same bits."""
    return torch.where(table >= 1 << 31, table - (1 << 32), table).to(torch.int32)


def _to_tiles(values: torch.Tensor, width: int) -> torch.Tensor:
    return values.unflatten(-1, (-1, width)).unflatten(-3, (-1, 16)).transpose(-2, -3).contiguous()


def _from_tiles(values: torch.Tensor, width: int) -> torch.Tensor:
    rows, columns = values.shape[-2:]
    tiles = values.reshape(*values.shape[:-2], rows // 16, columns // width, 16, width)
    return tiles.transpose(-2, -3).reshape(values.shape)
