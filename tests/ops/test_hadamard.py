"""The defining Hadamard rotation (spec v4 5.5)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from spyglass.ops.hadamard.reference import hadamard
from tests.tolerance import OP_FLOAT32, assert_close


def matrix(dim: int) -> np.ndarray:
    """Sylvester order: the sign of entry (i, j) is the parity of the bits that i and j share."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]) * dim**-0.5


@pytest.mark.parametrize("dim", [1, 2, 8, 128])
def test_it_is_the_sylvester_matrix(dim: int) -> None:
    x = torch.randn(5, 3, dim)
    assert_close(hadamard(x), x.double().numpy() @ matrix(dim), OP_FLOAT32)


def test_twice_gives_the_input_back() -> None:
    x = torch.randn(7, 64)
    assert_close(hadamard(hadamard(x)), x, OP_FLOAT32)


def test_golden_rows_agree_within_one_bf16_step(golden: Path) -> None:
    with np.load(golden / "quantisers.npz") as found:
        x, expected = torch.from_numpy(found["x"]), torch.from_numpy(found["hadamard128"])
    got = hadamard(x.unflatten(-1, (4, 128)).bfloat16()).flatten(-2).float()
    step = torch.ldexp(torch.ones_like(expected), torch.frexp(expected).exponent - 8)
    # where terms cancel, the golden sum (another order) is off by fp32 steps of its largest terms
    cancelled = x.abs().amax(dim=1, keepdim=True) * 2**-22
    assert ((got - expected).abs() <= torch.maximum(step, cancelled)).all()


def test_bf16_is_rounded_once() -> None:
    x = torch.randn(40, 128).bfloat16()
    exact = torch.from_numpy(x.double().numpy() @ matrix(128)).bfloat16()
    assert (hadamard(x) == exact).float().mean() > 0.99
