"""Stored weights to values and back: exact, in every format, whatever the block sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spyglass.errors import CheckpointError
from spyglass.quant.codec import decode, encode
from spyglass.quant.formats import BF16, F32, FP4, Format, fp8
from spyglass.quant.pack import e8m0_to_float, pack_e2m1, unpack_e2m1
from spyglass.quant.packed import Packed, empty_packed
from tests.unit.quant.test_rounding import e4m3_values

CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FORMATS = [fp8((128, 128)), fp8((32, 32)), fp8((1, 32)), FP4]


def random_packed(format: Format, shape: tuple[int, int], seed: int, scales: tuple[int, int] = (60, 190)) -> Packed:
    """Any codes (no NaN), scale bytes from a range."""
    generator = torch.Generator().manual_seed(seed)
    packed = empty_packed(format, shape)
    data = packed.data.view(torch.uint8).random_(0, 256, generator=generator)
    if format.name == "fp8":
        data[(data & 0x7F) == 0x7F] = 0x7E
    assert packed.scale is not None
    packed.scale.random_(*scales, generator=generator)
    return packed


def by_definition(packed: Packed) -> np.ndarray:
    """Values in float64, element by element from the definitions (spec v4 2.4)."""
    assert packed.scale is not None and packed.format.block is not None
    rows, columns = packed.format.block
    data, scale = packed.data.view(torch.uint8).numpy().astype(int), packed.scale.numpy().astype(float)
    values = np.empty(packed.shape)
    for o in range(packed.shape[0]):
        for i in range(packed.shape[1]):
            if packed.format.name == "fp4":
                code = data[o, i // 2] >> (4 * (i % 2)) & 15
                magnitude, sign = CODES[code & 7], code >> 3
            else:
                code = data[o, i]
                magnitude, sign = e4m3_values()[code & 127], code >> 7
            values[o, i] = np.copysign(magnitude, -1 if sign else 1) * 2.0 ** (scale[o // rows, i // columns] - 127)
    return values


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(4, 64), (130, 66), (33, 258)])
def test_decoding_is_the_definition(format: Format, shape: tuple[int, int]) -> None:
    packed = random_packed(format, shape, seed=1)
    expected = by_definition(packed)
    for dtype in (torch.float32, torch.bfloat16):
        assert np.array_equal(decode(packed, dtype).double().numpy(), expected), dtype


def test_decoding_does_not_depend_on_how_many_rows_are_done_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = random_packed(fp8((32, 32)), (200, 70), seed=2)
    whole = decode(packed)
    monkeypatch.setattr("spyglass.quant.codec.VALUES_AT_ONCE", 70 * 40)
    assert torch.equal(decode(packed), whole)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_stack_decodes_like_its_members(format: Format) -> None:
    members = [random_packed(format, (40, 96), seed) for seed in range(3)]
    scales = [member.scale for member in members if member.scale is not None]
    stack = Packed(format, torch.stack([m.data for m in members]), torch.stack(scales), (3, 40, 96))
    assert torch.equal(decode(stack), torch.stack([decode(member) for member in members]))
    assert torch.equal(decode(stack[1]), decode(members[1]))


def test_released_bytes_decode_to_the_printed_values() -> None:
    """Row 0 of a released FP8 matrix (spec v41 2.2)."""
    data = torch.tensor([[0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5]], dtype=torch.uint8)
    packed = Packed(fp8((32, 32)), data.view(torch.float8_e4m3fn), torch.tensor([[0x73]], dtype=torch.uint8), (1, 8))
    expected = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    assert decode(packed, torch.float32).tolist() == [expected]


def test_a_packed_fp4_matrix_has_two_values_a_byte_low_nibble_first() -> None:
    """16 bytes are 4 x 8 values, not 16; swapping the nibbles would exchange neighbours."""
    codes = torch.arange(32).view(4, 8) % 16
    data = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    scale = torch.tensor([[125], [126], [127], [130]], dtype=torch.uint8)
    values = decode(Packed(FP4, data, scale, (4, 8)), torch.float32)
    signed = np.concatenate([CODES, -CODES])
    expected = signed[codes.numpy()] * np.array([[0.25], [0.5], [1], [8]])
    assert data.numel() == 16 and values.numel() == 32
    assert np.array_equal(values.numpy(), expected)


def test_every_scale_byte_is_its_power_of_two() -> None:
    values = e8m0_to_float(torch.arange(256, dtype=torch.int32).to(torch.uint8)).double()
    assert torch.equal(values[:255], torch.exp2(torch.arange(255).double() - 127))
    assert values[255].isnan()


def test_every_byte_of_codes_survives_unpacking_and_packing() -> None:
    data = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(4, 64)
    assert torch.equal(pack_e2m1(unpack_e2m1(data)), data)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@given(seed=st.integers(0, 2**32), low=st.integers(0, 230), spread=st.integers(1, 16))
def test_values_of_a_format_go_back_into_it_without_loss(format: Format, seed: int, low: int, spread: int) -> None:
    packed = random_packed(format, (37, 70), seed, (low, low + spread))
    values = decode(packed, torch.float32)
    again = encode(values, format)
    back = decode(again, torch.float32)
    assert torch.equal(back, values) and torch.equal(torch.signbit(back), torch.signbit(values))


@pytest.mark.parametrize("block", [32, 128])
def test_fp4_goes_into_fp8_without_loss_where_the_scales_of_a_block_are_near(block: int) -> None:
    """Spec v4 2.4: codes have two significant bits, so e4m3 holds them over about 2^14 of scales."""
    packed = random_packed(FP4, (256, 256), seed=5, scales=(110, 122))
    values = decode(packed, torch.float32)
    assert torch.equal(decode(encode(values, fp8((block, block))), torch.float32), values)
    wide = decode(random_packed(FP4, (256, 256), seed=5, scales=(100, 140)), torch.float32)
    assert not torch.equal(decode(encode(wide, fp8((block, block))), torch.float32), wide)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_encoding_takes_the_smallest_scale_and_is_off_by_at_most_half_a_step(format: Format) -> None:
    x = torch.randn(96, 160, generator=torch.Generator().manual_seed(3))
    x[:, 40:50] *= 1e4
    x[7] = 0
    packed = encode(x, format)
    assert packed.scale is not None and format.block is not None
    assert packed.data.shape == format.storage_shape((96, 160)) and packed.scale.shape == format.scale_shape((96, 160))
    factor = e8m0_to_float(packed.scale).repeat_interleave(format.block[0], 0).repeat_interleave(format.block[1], 1)
    codes = x / factor[:96, :160]
    limit, significant, least = (448, 4, -6) if format.name == "fp8" else (6, 2, 0)
    step = torch.exp2(codes.abs().clamp(min=2.0**least).log2().floor() - (significant - 1))
    assert ((decode(packed, torch.float32) - x).abs() <= step / 2 * factor[:96, :160]).all()
    assert codes.abs().max() <= limit
    assert codes[:32].abs().max() > limit / 2, "half the scale would have done"


def test_float32_scales_of_base_models_multiply_in_float32() -> None:
    format = fp8((128, 128), "F32")
    data = torch.tensor([[1.0, 3.5, -448.0]]).to(torch.float8_e4m3fn)
    packed = Packed(format, data, torch.tensor([[0.3]]), (1, 3))
    expected = np.float32([1.0, 3.5, -448.0]) * np.float32(0.3)
    assert decode(packed, torch.float32).numpy().tolist() == [expected.tolist()]
    x = torch.randn(130, 200, generator=torch.Generator().manual_seed(4))
    again = encode(x, format)
    assert again.scale is not None and again.scale.dtype == torch.float32
    assert ((decode(again, torch.float32) - x).abs() <= x.abs() / 16 + 1e-2).all()


@pytest.mark.parametrize("format", [BF16, F32], ids=str)
def test_formats_without_scales_keep_the_values(format: Format) -> None:
    x = torch.randn(5, 7).bfloat16()
    packed = encode(x, format)
    assert packed.scale is None and torch.equal(decode(packed, torch.bfloat16), x)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_no_scale_can_hold_is_refused(bad: float) -> None:
    x = torch.ones(4, 64)
    x[1, 3] = bad
    with pytest.raises(CheckpointError, match="infinite or NaN"):
        encode(x, FP4)
