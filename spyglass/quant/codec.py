"""The arithmetic of the weight formats, and the rounding steps that activation quantisers are made of.

Decoding is exact: an e4m3 or e2m1 value times a power of two fits bfloat16 whenever its exponent does (spec v4 2.4).
Encoding picks the smallest power-of-two scale that holds the block, so values that came from a format with e8m0 scales
go back into it without loss, whatever scales they had before.
"""

from __future__ import annotations

import torch

from spyglass.errors import CheckpointError
from spyglass.quant.formats import Format
from spyglass.quant.pack import e8m0_from_exponent, e8m0_to_float, pack_e2m1, unpack_e2m1
from spyglass.quant.packed import Packed
from spyglass.quant.tiles import untile

E4M3_MAX = 448.0
E2M1_MAX = 6.0
VALUES_AT_ONCE = 1 << 18  # temporaries that stay in a processor's cache
_VALUES_AT_ONCE_ON_GPU = 1 << 26  # few launches, temporaries small beside the model


def round_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Nearest-even float8 e4m3 values of x, saturating at +-448, as float32. NaN stays NaN.

    Torch's own cast does not saturate, hence the clamp first (spec v41 4.1).
    """
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest-even e2m1 values of x, saturating at +-6, as float32; the sign of zero is kept (spec v4 2.5).

    The steps are 0.5 below 2, 1 below 4 and 2 above, and on each of them the even multiple has the even code.
    """
    x = x.float().clamp(-E2M1_MAX, E2M1_MAX)
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.round(x / step) * step


def ceil_pow2_scale(amax: torch.Tensor, limit_reciprocal: float) -> torch.Tensor:
    """2^ceil(log2(amax * limit_reciprocal)) in float32, from the bit pattern as the reference does it (spec v4 2.5).

    `limit_reciprocal` is 1/448 or 1/6 and is rounded to float32 first. `amax` has its lower bound already applied
    (1e-4 for e4m3, 6 * 2^-126 for e2m1), so the product is a normal number.
    """
    product = amax.float() * torch.full((), limit_reciprocal, dtype=torch.float32, device=amax.device)
    bits = product.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def decode(packed: Packed, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The matrix [..., out, in] in `dtype`: product of value and scale, rounded once."""
    if packed.tiled:
        packed = untile(packed)
    if packed.format.block is None:
        return packed.data.to(dtype)
    assert packed.scale is not None, packed.format
    rows, columns = packed.format.block
    data, scale = packed.data.flatten(0, -2), packed.scale.flatten(0, -2)
    out_features, in_features = packed.shape[-2:]
    # stacked matrices whose rows fill their last scale block are one tall matrix
    height = len(data) if out_features % rows == 0 else out_features
    at_once = VALUES_AT_ONCE if data.device.type == "cpu" else _VALUES_AT_ONCE_ON_GPU
    chunk = max(at_once // max(in_features, 1) // rows, 1) * rows
    result = torch.empty((len(data), in_features), dtype=dtype, device=data.device)
    for first in range(0, len(data), max(height, 1)):
        first_scale = first // max(height, 1) * -(-height // rows)
        for row in range(0, height, chunk):
            stop = min(row + chunk, height)
            factors = _factors(packed.format, scale[first_scale + row // rows : first_scale + -(-stop // rows)], dtype)
            if rows > 1:
                factors = factors.repeat_interleave(rows, dim=0)[: stop - row]
            values = _values(packed.format, data[first + row : first + stop], factors.dtype)
            place = result[first + row : first + stop]
            if in_features % columns:
                place.copy_(values.mul_(factors.repeat_interleave(columns, dim=1)[:, :in_features]))
            else:
                blocks = values.unflatten(1, (-1, columns)), place.unflatten(1, (-1, columns))
                torch.mul(blocks[0], factors[:, :, None], out=blocks[1])
    return result.view(packed.shape)


def _factors(format: Format, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales as numbers: in bfloat16 where the product is exact in it, else in float32."""
    if format.scale_dtype == "F32":
        return scale
    factors = e8m0_to_float(scale)
    return factors.to(dtype) if dtype == torch.bfloat16 else factors


def _values(format: Format, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Stored codes as unscaled numbers."""
    return unpack_e2m1(data, dtype) if format.name == "fp4" else data.to(dtype)


def encode(values: torch.Tensor, format: Format) -> Packed:
    """Store `values` [..., out, in] (vectors too, for formats without scales) in `format`.

    Scales are the smallest power of two with |value| / scale <= 448 (e4m3) or 6 (e2m1), float32 amax / 448 where
    the format says so. Exact for values that came from a format with e8m0 scales and the same blocks.

    Raises:
        CheckpointError: a value is infinite or NaN, which no block scale can hold.
    """
    shape = tuple(values.shape)
    if format.block is None:
        dtype = torch.bfloat16 if format.name == "bf16" else torch.float32
        return Packed(format, values.to(dtype), None, shape)
    blocks = _as_blocks(values.float(), format.block)
    amax = blocks.abs().amax(dim=(-3, -1), keepdim=True)
    if not torch.isfinite(amax).all():
        raise CheckpointError(
            f"a matrix of shape {shape} holds infinite or NaN values and cannot be stored as {format.name}"
        )
    limit = E2M1_MAX if format.name == "fp4" else E4M3_MAX
    if format.scale_dtype == "F32":
        factors = torch.where(amax > 0, amax / limit, torch.ones_like(amax))
        stored = factors
    else:
        stored = e8m0_from_exponent(_ceil_exponent(amax, limit))
        factors = e8m0_to_float(stored)
    scaled = _from_blocks(blocks / factors, shape)
    stored = stored.squeeze(-1).squeeze(-2)
    if format.name == "fp4":
        return Packed(format, pack_e2m1(round_e2m1(scaled)), stored, shape)
    return Packed(format, scaled.clamp(-limit, limit).to(torch.float8_e4m3fn), stored, shape)


def _ceil_exponent(amax: torch.Tensor, limit: float) -> torch.Tensor:
    """Smallest integer e with amax <= limit * 2^e (int32), exact for every float32; -127 for zero."""
    mantissa, exponent = torch.frexp(amax.double() / limit)
    ceiling = exponent - (mantissa == 0.5).to(torch.int32)
    return torch.where(amax > 0, ceiling, torch.full_like(ceiling, -127))


def _as_blocks(values: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[..., out, in] to [..., row blocks, rows, column blocks, columns], zero-padded to whole blocks."""
    rows, columns = block
    row_blocks, column_blocks = -(-values.shape[-2] // rows), -(-values.shape[-1] // columns)
    pad = (0, column_blocks * columns - values.shape[-1], 0, row_blocks * rows - values.shape[-2])
    padded = torch.nn.functional.pad(values, pad)
    return padded.view(*values.shape[:-2], row_blocks, rows, column_blocks, columns)


def _from_blocks(blocks: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Undo `_as_blocks`: back to the logical shape, padding dropped."""
    joined = blocks.flatten(-2).flatten(-3, -2)
    return joined[..., : shape[-2], : shape[-1]]
