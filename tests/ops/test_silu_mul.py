"""The defining gated unit (spec v4 9.3)."""

from __future__ import annotations

import torch

from spyglass.ops.silu_mul import triton
from spyglass.ops.silu_mul.reference import silu_mul
from tests.tolerance import OP_FLOAT32, assert_close


def test_the_first_half_is_the_gate() -> None:
    for shape in [(5, 14), (2, 3, 6), (0, 8)]:
        x = torch.randn(shape)
        gate, up = x.double().chunk(2, dim=-1)
        assert_close(silu_mul(x), gate / (1 + torch.exp(-gate)) * up, OP_FLOAT32)


def test_silu_is_rounded_before_the_product() -> None:
    gate, up = torch.linspace(-4, 4, 64).bfloat16(), torch.linspace(0.3, 7, 64).bfloat16()
    silu = (gate.double() * torch.sigmoid(gate.double())).bfloat16()
    assert torch.equal(silu_mul(torch.cat([gate, up])), (silu.double() * up.double()).bfloat16())


def test_a_kernel_hands_gradients_to_the_reference() -> None:
    x = torch.randn(3, 8).requires_grad_()
    (gradient,) = torch.autograd.grad(triton.silu_mul(x).sum(), x)
    (expected,) = torch.autograd.grad(silu_mul(x).sum(), x)
    assert torch.equal(gradient, expected)
