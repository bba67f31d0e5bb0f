"""The defining rms_norm against its formula in float64, term by term."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spyglass.ops.rms_norm.reference import rms_norm
from tests.tolerance import OP_FLOAT32, assert_close


def formula(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> np.ndarray:
    wide = x.double().numpy()
    out = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps)
    return out if weight is None else out * weight.double().numpy()


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 4, 33), (0, 8)])
def test_it_is_its_formula(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(*shape), torch.randn(shape[-1])
    assert_close(rms_norm(x, weight, eps=1e-3), formula(x, weight, 1e-3), OP_FLOAT32)
    assert_close(rms_norm(x, None, eps=1e-3), formula(x, None, 1e-3), OP_FLOAT32)


def test_a_zero_row_stays_zero_with_the_released_eps() -> None:
    """1e-20 is a normal float32; a kernel that loses it gives NaN."""
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(
            rms_norm(torch.zeros(2, 8, dtype=dtype), torch.ones(8), eps=1e-20), torch.zeros(2, 8, dtype=dtype)
        )


def test_eps_is_added_to_the_mean_square() -> None:
    """Mean square 1e-16 beside eps 1e-20, and beside the older eps 1e-6."""
    x = torch.full((1, 8), 1e-8)
    assert_close(rms_norm(x, torch.ones(8), eps=1e-20), np.full((1, 8), (1 + 1e-4) ** -0.5), OP_FLOAT32)
    assert float(rms_norm(x, torch.ones(8), eps=1e-20)[0, 0]) == pytest.approx(0.99995, abs=1e-6)
    assert float(rms_norm(x, torch.ones(8), eps=1e-6)[0, 0]) == pytest.approx(1e-5, rel=1e-4)


def test_the_mean_runs_over_the_last_axis_only() -> None:
    x = torch.tensor([[1.0, 1.0], [100.0, 100.0]])
    assert_close(rms_norm(x, None, eps=0.0), np.ones((2, 2)), OP_FLOAT32)


def test_bf16_is_computed_in_fp32_and_rounded_once() -> None:
    x, weight = torch.randn(6, 40).bfloat16(), torch.randn(40).bfloat16()
    expected = torch.from_numpy(formula(x, weight, 1e-6)).to(torch.bfloat16)
    assert torch.equal(rms_norm(x, weight, eps=1e-6), expected)


def test_stepwise_rounds_after_every_operation() -> None:
    """Spec v4 3.6: square, mean, + eps, rsqrt and product are each a bf16 tensor."""
    x = torch.randn(50, 3, 64).bfloat16()
    square = (x.double() ** 2).bfloat16()
    mean = square.double().mean(dim=-1, keepdim=True).bfloat16()
    root = ((mean.double() + 1e-2).bfloat16().double() ** -0.5).bfloat16()
    expected = (x.double() * root.double()).bfloat16()
    got = rms_norm(x, None, eps=1e-2, stepwise=True)
    assert torch.equal(got, expected)
    assert not torch.equal(got, rms_norm(x, None, eps=1e-2)), "one rounding would give something else"
