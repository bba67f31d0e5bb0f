"""What the matrix units are given, and what stays with the reference; the numbers themselves are checked on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spyglass.ops.linear_block import cublas, reference
from spyglass.ops.table import describe
from spyglass.quant.codec import encode
from spyglass.quant.formats import BF16, F32, FP4, FakeQuant, Format, fp8
from tests.tolerance import OP_BFLOAT16, assert_close


def test_it_serves_bfloat16_on_cuda() -> None:
    assert cublas.usable("cuda", "bfloat16") and not cublas.usable("cuda", "float32")
    assert describe("cuda", "float32")["linear_block"] == "reference"
    assert describe("cpu", "bfloat16")["linear_block"] != "cublas"


@pytest.mark.parametrize(
    ("dtype", "format", "rounding"),
    [
        (torch.float32, BF16, None),
        (torch.bfloat16, F32, None),
        (torch.bfloat16, fp8((128, 128)), FakeQuant(element="e4m3", block=128)),
        (torch.bfloat16, FP4, None),
        (torch.bfloat16, BF16, FakeQuant(element="e4m3", block=128)),
    ],
)
def test_other_dtypes_formats_and_rounded_inputs_go_to_the_reference(
    dtype: torch.dtype, format: Format, rounding: FakeQuant | None
) -> None:
    x, weight = torch.randn(5, 128).to(dtype), encode(torch.randn(24, 128), format)
    options: dict[str, Any] = {"rounding": rounding, "bias_O": torch.randn(24), "addend_TO": torch.randn(5, 24)}
    assert torch.equal(cublas.linear_block(x, weight, **options), reference.linear_block(x, weight, **options))


@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,)])
@pytest.mark.parametrize("biased", [False, True])
def test_leading_axes_stay_and_the_bias_is_added(shape: tuple[int, ...], biased: bool) -> None:
    x, weight = torch.randn(*shape, 32).bfloat16(), encode(torch.randn(24, 32), BF16)
    bias = torch.randn(24).bfloat16() if biased else None
    out = cublas.linear_block(x, weight, bias_O=bias)
    assert out.dtype == torch.bfloat16 and out.shape == (*shape, 24)
    assert_close(out, reference.linear_block(x, weight, bias_O=bias), OP_BFLOAT16)


def test_gradients_pass_through_the_fp32_product() -> None:
    x, weight = torch.randn(5, 32).bfloat16().requires_grad_(), encode(torch.randn(24, 32), BF16)
    out = cublas.linear_block(x, weight, addend_TO=torch.randn(5, 24), out_dtype=torch.float32)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert_close(gradient, weight.data.float().sum(0).expand(5, -1), OP_BFLOAT16)
