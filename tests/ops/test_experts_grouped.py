"""The defining expert op against float64, term by term (spec v4 7.4, 7.5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spyglass.ops.experts_grouped.reference import experts_grouped
from spyglass.ops.fake_quant.reference import fake_quant
from spyglass.quant.codec import decode, encode
from spyglass.quant.formats import BF16, F32, FP4, FakeQuant, Format
from spyglass.quant.packed import Packed
from tests.tolerance import OP_FLOAT32, assert_close

A8 = FakeQuant(element="e4m3", block=128)
E, C, F = 5, 64, 32


class Case:
    """Eleven rows, two or three of five experts each; expert 3 gets none."""

    def __init__(self, format: Format = F32, dtype: torch.dtype = torch.float32, gain: float = 0.5) -> None:
        self.w1, self.w3 = (encode(gain * torch.randn(E, F, C), format) for _ in range(2))
        self.w2 = encode(gain * torch.randn(E, C, F), format)
        self.x = torch.randn(11, C).to(dtype)
        choices = [torch.tensor([0, 1, 2, 4])[torch.randperm(4)[:3]] for _ in range(11)]
        self.ids, self.weights = torch.stack(choices).int(), torch.rand(11, 3) + 0.1

    def run(self, limit: float = 1.0, rounding: FakeQuant | None = None) -> torch.Tensor:
        return experts_grouped(
            self.x, self.ids, self.weights, self.w1, self.w3, self.w2, limit=limit, rounding=rounding
        )

    def expected(self, limit: float = 1.0) -> np.ndarray:
        out = np.zeros((11, C))
        for t in range(11):
            for k in range(3):
                e = int(self.ids[t, k])
                if e >= 0:
                    out[t] += one_expert(self, t, e, float(self.weights[t, k]), limit)
        return out


def wide(weight: Packed, expert: int) -> Any:
    return decode(weight[expert], torch.float32).double().numpy()


def one_expert(case: Case, t: int, e: int, share: float, limit: float) -> np.ndarray:
    x = case.x[t].double().numpy()
    g, u = np.minimum(wide(case.w1, e) @ x, limit), np.clip(wide(case.w3, e) @ x, -limit, limit)
    return np.asarray(wide(case.w2, e) @ (share * g / (1 + np.exp(-g)) * u))


@pytest.mark.parametrize("format", [F32, BF16, FP4])
@pytest.mark.parametrize("limit", [0.5, 1e9])
def test_it_is_its_formula(format: Format, limit: float) -> None:
    case = Case(format)
    got = case.run(limit)
    assert got.dtype == torch.float32
    assert_close(got, case.expected(limit), OP_FLOAT32)


def test_minus_one_takes_part_in_nothing() -> None:
    case = Case()
    case.ids[3], case.ids[5, 1] = -1, -1
    got = case.run()
    assert torch.equal(got[3], torch.zeros(C))
    assert_close(got, case.expected(), OP_FLOAT32)


def single(g: float, u: float, limit: float, share: float = 1.0) -> float:
    """One expert of width one with given gate and up values and w2 = 1."""
    one = torch.ones(1, 1)
    weights = [encode(torch.tensor([[[value]]]), F32) for value in (g, u, 1.0)]
    out = experts_grouped(one, torch.zeros(1, 1, dtype=torch.int32), share * one, *weights, limit=limit)
    return float(out)


def silu(x: float) -> float:
    return x / (1 + np.exp(-x))


def test_gate_is_clamped_above_only_and_up_on_both_sides() -> None:
    assert single(20.0, 1.0, 10.0) == pytest.approx(silu(10.0))
    assert single(-20.0, 1e6, 1e7) == pytest.approx(silu(-20.0) * 1e6, rel=1e-5)
    assert single(1.0, 20.0, 10.0) == pytest.approx(silu(1.0) * 10)
    assert single(1.0, -20.0, 10.0) == pytest.approx(silu(1.0) * -10)


def test_the_routing_weight_comes_before_the_rounding_of_the_activation() -> None:
    """A weight of 1.1 moves bf16 and FP8 codes of the activation; applied behind w2 it would not."""
    case = Case(dtype=torch.bfloat16, format=BF16)
    case.weights[:] = 1.1
    for rounding in (None, A8):
        got = case.run(1e9, rounding)
        before, after = manual(case, rounding, inside=True), manual(case, rounding, inside=False)
        assert (got == before).float().mean() > 0.97
        assert (got == after).float().mean() < 0.7


def manual(case: Case, rounding: FakeQuant | None, *, inside: bool) -> torch.Tensor:
    """Rounded arithmetic, the weight applied inside (as the model does) or behind w2."""
    out = torch.zeros(11, C)
    for t in range(11):
        for e, share in sorted(zip(case.ids[t].tolist(), case.weights[t].tolist(), strict=True)):
            x = case.x[t] if rounding is None else fake_quant(case.x[t], rounding)
            g, u = ((x.double() @ w.data[e].double().T).bfloat16().float() for w in (case.w1, case.w3))
            z = torch.nn.functional.silu(g) * u * (share if inside else 1.0)
            z = z.bfloat16() if rounding is None else fake_quant(z.bfloat16(), rounding)
            y = z.double() @ case.w2.data[e].double().T
            out[t] += (y if inside else y * share).bfloat16().float()
    return out


def test_each_expert_is_rounded_and_the_sum_is_not() -> None:
    case = Case(dtype=torch.bfloat16, format=BF16)
    got = case.run(1e9)
    assert got.dtype == torch.float32
    assert (got != got.bfloat16().float()).float().mean() > 0.3, "the sum of rounded outputs has more digits than bf16"
    assert (got == manual(case, None, inside=True)).float().mean() > 0.97


def test_no_rows_and_unused_experts_are_fine() -> None:
    case = Case()
    out = experts_grouped(case.x[:0], case.ids[:0], case.weights[:0], case.w1, case.w3, case.w2, limit=1.0)
    assert out.shape == (0, C)
