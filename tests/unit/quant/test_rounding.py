"""The rounding steps of the quantisers against tables, brute force and golden vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from spyglass.quant.codec import ceil_pow2_scale, round_e2m1, round_e4m3

TIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}


def e4m3_values() -> np.ndarray:
    """The 127 non-negative e4m3 numbers in code order, from the definition: bias 7, subnormals of 2^-9, no infinity."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def nearest_even(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Nearest of sorted non-negative `values` for |x|, ties to the even index, beyond the last the last; sign kept."""
    index = np.clip(np.searchsorted(values, np.abs(x)), 1, len(values) - 1)
    below, above = np.abs(x) - values[index - 1], values[index] - np.abs(x)
    up = (above < below) | ((above == below) & (index % 2 == 0))
    return np.copysign(values[np.where(up, index, index - 1)], x)


def all_bfloat16(limit: float) -> torch.Tensor:
    """Every finite bfloat16 up to `limit`, both signs, and the midpoints to the next one."""
    bits = torch.arange(0, 0x7F80, dtype=torch.int32)
    x = (bits << 16).view(torch.float32)
    x = torch.cat([x, ((bits << 16) + 0x8000).view(torch.float32)])
    x = x[x <= limit]
    return torch.cat([x, -x])


def same_bits(actual: torch.Tensor, expected: np.ndarray) -> bool:
    return torch.equal(actual.view(torch.int32), torch.from_numpy(expected.astype(np.float32)).view(torch.int32))


def test_e2m1_ties_go_to_the_even_code_and_keep_the_sign() -> None:
    for x, rounded in TIES.items():
        for sign in (1.0, -1.0):
            result = round_e2m1(torch.tensor([sign * x]))
            assert same_bits(result, np.array([sign * rounded])), (sign * x, result)


def test_e2m1_is_the_nearest_code_everywhere() -> None:
    x = all_bfloat16(1e9)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert same_bits(round_e2m1(x), nearest_even(x.double().numpy(), values))


def test_e4m3_is_the_nearest_code_everywhere_and_saturates() -> None:
    x = all_bfloat16(1e9)
    assert same_bits(round_e4m3(x), nearest_even(x.double().numpy(), e4m3_values()))
    assert round_e4m3(torch.tensor([449.0, -1e30, torch.inf])).tolist() == [448.0, -448.0, 448.0]


def test_nan_stays_nan() -> None:
    assert round_e4m3(torch.tensor([torch.nan])).isnan().all()
    assert round_e2m1(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize("limit", [448.0, 6.0])
def test_the_scale_is_the_smallest_power_of_two_that_holds_the_block(limit: float) -> None:
    exponents = torch.arange(-100, 100).double()
    exact = (limit * torch.exp2(exponents)).float()
    just_above = torch.nextafter(torch.nextafter(exact, exact * 2), exact * 2)
    assert torch.equal(ceil_pow2_scale(exact, 1 / limit), torch.exp2(exponents).float())
    assert torch.equal(ceil_pow2_scale(just_above, 1 / limit), torch.exp2(exponents + 1).float())


def test_the_reciprocal_is_rounded_to_float32_before_the_product() -> None:
    """The largest value whose float32 product with fp32(1/6) is still 1 lies above 6; exact division would say 2."""
    amax = torch.nextafter(torch.tensor([6.0]), torch.tensor([7.0]))
    product = np.float32(amax.item()) * np.float32(1 / 6)
    assert ceil_pow2_scale(amax, 1 / 6).item() == (1.0 if product == 1 else 2.0)


def quantised(x: torch.Tensor, block: int, element: str, scale: str = "e8m0") -> torch.Tensor:
    """Quantise and dequantise along rows, spelt out from the primitives (spec v4 2.5, v41 4.1)."""
    blocks = x.float().unflatten(-1, (-1, block))
    amax = blocks.abs().amax(-1, keepdim=True)
    if element == "e4m3":
        factor = ceil_pow2_scale(amax.clamp(min=1e-4), 1 / 448)
        codes = round_e4m3(blocks / factor)
    elif scale == "e8m0":
        factor = ceil_pow2_scale(amax.clamp(min=6 * 2.0**-126), 1 / 6)
        codes = round_e2m1(blocks / factor)
    else:
        factor = round_e4m3(amax.clamp(min=6 * 2.0**-9) / 6)
        codes = round_e2m1(blocks / factor)
    return (codes * factor).bfloat16().float().flatten(-2)


def test_printed_fp8_block() -> None:
    x = torch.tensor([1.0, -0.30078125, 0.01696777, 448, 500, 0.00099945]).bfloat16()
    assert quantised(x, 6, "e4m3").tolist() == [1.0, -0.3125, 0.015625, 448.0, 512.0, 0.0]


def test_printed_fp4_block() -> None:
    x = torch.tensor([1, -0.30078125, 0.25, 0.75, 1.25, 2.5, 5, 7]).bfloat16()
    assert same_bits(quantised(x, 8, "e2m1"), np.array([1, -0.0, 0, 1, 1, 2, 4, 8]))


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (1.0, (1.0, 1.0, 1.03125)),
        (0.02, (0.01953125, 0.0234375, 0.0234375)),
        (2688.0, (2560.0, 3072.0, 2688.0)),
        (1e-5, (9.5367431640625e-06, None, 0.0)),
    ],
)
def test_printed_constant_blocks(x: float, expected: tuple[float, float | None, float]) -> None:
    block = torch.full((32,), x)
    results = (quantised(block, 32, "e4m3"), quantised(block, 32, "e2m1"), quantised(block, 16, "e2m1", "e4m3"))
    for result, value in zip(results, expected, strict=True):
        assert value is None or set(result.tolist()) == {value}


@pytest.mark.parametrize(
    ("name", "block", "element", "scale"),
    [
        ("q8_b128", 128, "e4m3", "e8m0"),
        ("q8_b64", 64, "e4m3", "e8m0"),
        ("q8_b32", 32, "e4m3", "e8m0"),
        ("q4_b32_e8m0", 32, "e2m1", "e8m0"),
        ("q4_b16_e4m3", 16, "e2m1", "e4m3"),
    ],
)
def test_golden_vectors(golden: Path, name: str, block: int, element: str, scale: str) -> None:
    with np.load(golden / "quantisers.npz") as found:
        result = quantised(torch.from_numpy(found["x"]), block, element, scale)
        assert same_bits(result, found[name])
