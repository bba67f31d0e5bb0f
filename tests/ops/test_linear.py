"""The defining linear ops against float64: every format, the order of rounding, addend and bias (spec v4 2.5, 4.6)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spyglass.ops.fake_quant.reference import fake_quant
from spyglass.ops.linear_block.reference import linear_block
from spyglass.ops.linear_grouped.reference import linear_grouped
from spyglass.quant.codec import decode, encode
from spyglass.quant.formats import BF16, F32, FP4, FakeQuant, Format, fp8
from tests.tolerance import OP_FLOAT32, assert_close

A8 = FakeQuant(element="e4m3", block=128)
FORMATS = {"f32": F32, "bf16": BF16, "fp8": fp8((128, 128)), "fp8 small blocks": fp8((32, 32)), "fp4": FP4}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 64, 1), (5, 160, 133), (0, 32, 7)])
def test_it_is_a_product_with_the_decoded_weight(name: str, rows: int, inner: int, outer: int) -> None:
    x, weight = torch.randn(rows, inner), encode(torch.randn(outer, inner), FORMATS[name])
    expected = x.double().numpy() @ decode(weight, torch.float32).double().numpy().T
    assert_close(linear_block(x, weight), expected, OP_FLOAT32)


def test_leading_axes_are_kept() -> None:
    x, weight = torch.randn(2, 3, 32), encode(torch.randn(5, 32), F32)
    assert_close(linear_block(x, weight), linear_block(x.flatten(0, 1), weight).view(2, 3, 5), OP_FLOAT32)


def test_the_input_is_rounded_first_and_only_when_asked() -> None:
    x, weight = torch.randn(4, 256), encode(torch.randn(9, 256), F32)
    rounded = linear_block(x, weight, rounding=A8)
    assert_close(rounded, linear_block(fake_quant(x, A8), weight), OP_FLOAT32)
    assert (rounded - linear_block(x, weight)).abs().max() > 1e-2


def test_bias_and_addend_join_before_the_one_rounding() -> None:
    """bf16: the sum of all three is rounded once; rounding the product first gives other bits."""
    x, weight = torch.randn(50, 64).bfloat16(), encode(torch.randn(40, 64), BF16)
    addend, bias = torch.randn(50, 40), torch.randn(40)
    product = x.double() @ weight.data.double().T
    got = linear_block(x, weight, addend_TO=addend, bias_O=bias)
    assert got.dtype == torch.bfloat16
    expected = (product + addend.double() + bias.double()).bfloat16()
    twice = (product.bfloat16().double() + addend.double() + bias.double()).bfloat16()
    assert (got == expected).float().mean() > 0.995
    assert (got == twice).float().mean() < 0.9


def test_a_zero_addend_changes_no_bit() -> None:
    x, weight = torch.randn(5, 64).bfloat16(), encode(torch.randn(7, 64), BF16)
    assert torch.equal(linear_block(x, weight, addend_TO=torch.zeros(5, 7)), linear_block(x, weight))


def test_the_product_may_leave_in_fp32() -> None:
    x, weight = torch.randn(5, 64).bfloat16(), encode(torch.randn(7, 64), BF16)
    got = linear_block(x, weight, out_dtype=torch.float32)
    assert got.dtype == torch.float32
    assert_close(got, x.double().numpy() @ weight.data.double().numpy().T, OP_FLOAT32)


@pytest.mark.parametrize("format", [F32, BF16, fp8((128, 128))])
def test_groups_read_only_their_own_part(format: Format) -> None:
    x, weight = torch.randn(5, 3, 64), encode(torch.randn(3 * 7, 64), format)
    wide = decode(weight, torch.float32).double().numpy().reshape(3, 7, 64)
    expected = np.stack([x[:, g].double().numpy() @ wide[g].T for g in range(3)], axis=1)
    assert_close(linear_grouped(x, weight), expected, OP_FLOAT32)
    addend = torch.randn(5, 3, 7)
    assert_close(linear_grouped(x, weight, addend_TGO=addend), expected + addend.double().numpy(), OP_FLOAT32)


def test_the_grouped_input_is_never_rounded() -> None:
    """Spec v4 4.6: an FP8 weight, and still the exact bf16 input."""
    x, weight = torch.randn(20, 2, 128).bfloat16(), encode(torch.randn(2 * 5, 128), fp8((128, 128)))
    wide = decode(weight).double().view(2, 5, 128)
    expected = torch.einsum("tgi,goi->tgo", x.double(), wide).bfloat16()
    assert (linear_grouped(x, weight) == expected).float().mean() > 0.99
