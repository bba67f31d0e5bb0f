"""The defining rotary embedding of the tower, half-split pairs (spec v4 9.3)."""

from __future__ import annotations

import numpy as np
import torch

from spyglass.ops.rope_half import triton
from spyglass.ops.rope_half.reference import rope_half
from tests.tolerance import OP_FLOAT32, assert_close


def tables(rows: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.randn(rows, pairs)
    return angle.cos(), angle.sin()


def formula(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> np.ndarray:
    """Channels d and d + D / 2 as one complex number, turned."""
    a, b = np.split(x.double().numpy(), 2, axis=-1)
    turned = (a + 1j * b) * (cos.double().numpy() + 1j * sin.double().numpy())[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def test_it_is_its_formula() -> None:
    for rows, heads, dim in [(5, 3, 14), (1, 1, 2), (0, 2, 8)]:
        x, (cos, sin) = torch.randn(rows, heads, dim), tables(rows, dim // 2)
        assert_close(rope_half(x, cos, sin), formula(x, cos, sin), OP_FLOAT32)


def test_pairs_are_half_split() -> None:
    x = torch.arange(8, dtype=torch.float32).view(1, 1, 8)
    turned = rope_half(x, torch.zeros(1, 4), torch.ones(1, 4))  # a quarter turn: (a, b) -> (-b, a)
    assert turned.flatten().tolist() == [-4, -5, -6, -7, 0, 1, 2, 3]


def test_the_input_may_be_part_of_a_wider_row_and_stays() -> None:
    qkv, (cos, sin) = torch.randn(6, 3, 2, 10), tables(6, 5)
    before = qkv.clone()
    out = rope_half(qkv[:, :2].flatten(1, 2), cos, sin)
    assert_close(out, formula(before[:, :2].flatten(1, 2), cos, sin), OP_FLOAT32)
    assert torch.equal(qkv, before)


def test_turning_is_done_in_float32_and_rounded_once() -> None:
    x = torch.tensor([[[1.0078125, 0.99609375]]], dtype=torch.bfloat16)
    cos, sin = torch.tensor([[0.7071]]), torch.tensor([[0.7072]])
    a, b, c, s = 1.0078125, 0.99609375, 0.7071, 0.7072
    expected = torch.tensor([a * c - b * s, b * c + a * s]).bfloat16()
    assert torch.equal(rope_half(x, cos, sin).flatten(), expected)


def test_a_kernel_hands_gradients_to_the_reference() -> None:
    x, (cos, sin) = torch.randn(3, 2, 8).requires_grad_(), tables(3, 4)
    (gradient,) = torch.autograd.grad(triton.rope_half(x, cos, sin).square().sum(), x)
    assert_close(gradient, 2 * x, OP_FLOAT32)  # turning keeps lengths
