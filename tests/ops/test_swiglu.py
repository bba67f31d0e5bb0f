"""The gated unit against its formula, clamps included (spec v4 7.4)."""

from __future__ import annotations

import torch

from spyglass.ops.swiglu.reference import swiglu
from tests.tolerance import OP_FLOAT32, assert_close


def test_it_is_its_formula_with_a_gate_that_is_clamped_above_and_a_factor_clamped_on_both_sides() -> None:
    gate = torch.tensor([-50.0, -2.0, 0.5, 1.4, 9.0, 1.0, 1.0])
    up = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 7.0, -7.0])
    kept = torch.tensor([-50.0, -2.0, 0.5, 1.4, 1.5, 1.0, 1.0])
    factor = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.5, -1.5])
    assert_close(swiglu(gate[None], up[None], limit=1.5)[0], kept / (1 + torch.exp(-kept)) * factor, OP_FLOAT32)


def test_it_rounds_once() -> None:
    gate, up = torch.randn(40, 8).bfloat16(), torch.randn(40, 8).bfloat16()
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    got = swiglu(gate, up, limit=99.0)
    assert got.dtype == torch.bfloat16 and torch.equal(got, exact.float().bfloat16())
