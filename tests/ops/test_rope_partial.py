"""The defining rotary embedding (spec v4 4.3)."""

from __future__ import annotations

import numpy as np
import torch

from spyglass.ops.rope_partial.reference import rope_partial
from tests.tolerance import OP_FLOAT32, assert_close


def tables(tokens: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.randn(tokens, pairs)
    return angle.cos(), angle.sin()


def formula(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> np.ndarray:
    """Each pair as a complex number, turned."""
    out = x.double().numpy().copy()
    pairs = cos.shape[1]
    for t in range(len(out)):
        for i in range(pairs):
            a = out.shape[-1] - 2 * pairs + 2 * i
            turned = (out[t, ..., a] + 1j * out[t, ..., a + 1]) * complex(cos[t, i], sign * sin[t, i])
            out[t, ..., a], out[t, ..., a + 1] = turned.real, turned.imag
    return out


def test_interleaved_pairs_of_the_last_channels_turn() -> None:
    for shape in [(5, 3, 14), (4, 14), (1, 2, 6), (0, 3, 14)]:
        x, (cos, sin) = torch.randn(*shape), tables(shape[0], 3)
        assert_close(rope_partial(x, cos, sin), formula(x, cos, sin, 1), OP_FLOAT32)
        assert_close(rope_partial(x, cos, sin, inverse=True), formula(x, cos, sin, -1), OP_FLOAT32)


def test_leading_channels_pass_and_the_input_stays() -> None:
    x, (cos, sin) = torch.randn(5, 3, 14), tables(5, 3)
    before = x.clone()
    out = rope_partial(x, cos, sin)
    assert torch.equal(out[..., :8], x[..., :8]) and torch.equal(x, before)
    assert not torch.equal(out[..., 8:], x[..., 8:])


def test_the_inverse_turns_back() -> None:
    x, (cos, sin) = torch.randn(5, 3, 14), tables(5, 3)
    assert_close(rope_partial(rope_partial(x, cos, sin), cos, sin, inverse=True), x, OP_FLOAT32)


def test_bf16_is_turned_in_fp32_and_rounded_once() -> None:
    x, (cos, sin) = torch.randn(50, 2, 16).bfloat16(), tables(50, 4)
    expected = torch.from_numpy(formula(x, cos, sin, 1)).bfloat16()
    assert (rope_partial(x, cos, sin) == expected).float().mean() > 0.998
