"""The defining fake_quant: printed values of the specification, and each of its terms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from spyglass.ops.fake_quant.reference import fake_quant
from spyglass.quant.formats import FakeQuant

Q8 = FakeQuant(element="e4m3", block=64)
Q4 = FakeQuant(element="e2m1", block=32)
F4E = FakeQuant(element="e2m1", block=16, scale="e4m3")


def test_the_printed_fp8_block() -> None:
    """Spec v4 2.5."""
    x = torch.tensor([1.0, -0.30078125, 0.01696777, 448, 500, 0.00099945])
    assert fake_quant(x, FakeQuant(element="e4m3", block=128)).tolist() == [1.0, -0.3125, 0.015625, 448, 512, 0]


def test_the_printed_fp4_block() -> None:
    """Spec v4 2.5; ties go to the even code, and the sign of zero stays."""
    x = torch.tensor([1, -0.30078125, 0.25, 0.75, 1.25, 2.5, 5, 7])
    got = fake_quant(x, Q4)
    assert got.tolist() == [1, -0.0, 0, 1, 1, 2, 4, 8]
    assert torch.signbit(got[1])


@pytest.mark.parametrize(
    ("value", "a8", "f4u", "f4e"),
    [
        (1, 1, 1, 1.03125),
        (0.02, 0.01953125, 0.0234375, 0.0234375),
        (2688, 2560, 3072, 2688),
        (1e-5, 9.5367e-6, None, 0),
    ],
)
def test_the_printed_constant_blocks(value: float, a8: float, f4u: float | None, f4e: float) -> None:
    """Spec v41 4.1."""
    x = torch.full((32,), float(value))
    assert fake_quant(x, FakeQuant(element="e4m3", block=32))[0].item() == pytest.approx(a8, rel=1e-5)
    assert fake_quant(x, F4E)[0].item() == pytest.approx(f4e, rel=1e-5)
    if f4u is not None:
        assert fake_quant(x, Q4)[0].item() == f4u


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("q8_b128", FakeQuant(element="e4m3", block=128)),
        ("q8_b64", Q8),
        ("q8_b32", FakeQuant(element="e4m3", block=32)),
        ("q4_b32_e8m0", Q4),
        ("q4_b16_e4m3", F4E),
    ],
)
def test_golden_rows_are_equal_in_every_bit(name: str, spec: FakeQuant, golden: Path) -> None:
    with np.load(golden / "quantisers.npz") as found:
        x, expected = torch.from_numpy(found["x"]), torch.from_numpy(found[name])
    assert torch.equal(fake_quant(x.bfloat16(), spec).float(), expected)
    assert torch.equal(fake_quant(x, spec).bfloat16().float(), expected), "fp32 in, bf16 at the end"


def test_each_block_has_its_own_scale_and_a_short_last_block_is_taken_as_it_is() -> None:
    x = torch.cat([torch.full((64,), 1000.0), torch.full((64,), 0.01), torch.full((5,), 3.0)])
    got = fake_quant(x, Q8)
    assert got[0] == 1024 and abs(got[64] - 0.01) < 0.001 and got[128] == 3
    assert torch.equal(got, torch.cat([fake_quant(part, Q8) for part in x.split(64)]))


def test_rows_do_not_share_scales() -> None:
    x = torch.tensor([[1000.0] * 64, [0.01] * 64])
    assert torch.equal(fake_quant(x, Q8)[1], fake_quant(x[1], Q8))


def test_channels_behind_dims_pass_unchanged_or_as_bf16() -> None:
    x = torch.randn(5, 80)
    got = fake_quant(x, Q8, dims=72)
    assert torch.equal(got[:, 72:], x[:, 72:])
    assert torch.equal(got[:, :72], fake_quant(x[:, :72], Q8))
    assert not torch.equal(got[:, 64:72], x[:, 64:72]), "channels 64..71 belong to the quantised part"
    tail = fake_quant(x, Q8, dims=72, tail_bf16=True)
    assert torch.equal(tail[:, 72:], x[:, 72:].bfloat16().float())
    assert torch.equal(tail[:, :72], got[:, :72])


def test_amax_has_a_floor() -> None:
    """max(amax, 1e-4): a tiny block keeps the scale of 1e-4, so its values fall to zero."""
    x = torch.full((64,), 1e-10)
    assert fake_quant(x, Q8).abs().max() == 0
    assert fake_quant(torch.zeros(64), Q8).abs().max() == 0
    assert fake_quant(torch.zeros(32), Q4).abs().max() == 0
    tiny = torch.full((32,), 2.0**-125)
    assert torch.equal(fake_quant(tiny, Q4), tiny), "the FP4 floor is 6 · 2^-126"


def test_scales_are_powers_of_two_rounded_up() -> None:
    """amax just above 448 takes scale 2: 449 becomes 448, and odd multiples of its step move."""
    x = torch.zeros(64)
    x[0], x[1] = 449.0, 1.0 + 2**-9
    assert fake_quant(x, Q8)[0] == 448
    x[0] = 448.0
    assert fake_quant(x, Q8)[0] == 448


def test_the_dtype_stays_and_empty_tensors_pass() -> None:
    assert fake_quant(torch.randn(3, 64).bfloat16(), Q8).dtype == torch.bfloat16
    assert fake_quant(torch.empty(0, 64), Q8).shape == (0, 64)
