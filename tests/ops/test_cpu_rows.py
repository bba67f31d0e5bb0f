"""Compiled row-wise ops against the reference: norms, rotation, rounding, streams, pooling, routing, cache writes."""

from __future__ import annotations

import itertools

import pytest
import torch

from spyglass.errors import DeviceError
from spyglass.ops.add_shared import cpu as shared_cpu
from spyglass.ops.add_shared import reference as shared_reference
from spyglass.ops.fake_quant import cpu as quant_cpu
from spyglass.ops.fake_quant import reference as quant_reference
from spyglass.ops.hadamard import cpu as hadamard_cpu
from spyglass.ops.hadamard import reference as hadamard_reference
from spyglass.ops.hyper_expand import cpu as expand_cpu
from spyglass.ops.hyper_mix import cpu as mix_cpu
from spyglass.ops.hyper_mix import reference as mix_reference
from spyglass.ops.rms_norm import cpu as norm_cpu
from spyglass.ops.rms_norm import reference as norm_reference
from spyglass.ops.router_topk import cpu as router_cpu
from spyglass.ops.swiglu import cpu as swiglu_cpu
from spyglass.ops.swiglu import reference as swiglu_reference
from spyglass.quant.formats import FakeQuant
from tests.ops.cpu_kernels import DTYPES, ROWS, every_isa, kernels, tolerance
from tests.tolerance import OP_FLOAT32, assert_close

QUANTS = [
    FakeQuant(element=element, block=block, scale=scale)
    for element, block, scale in [
        ("e4m3", 128, "e8m0"),
        ("e4m3", 64, "e8m0"),
        ("e2m1", 32, "e8m0"),
        ("e2m1", 16, "e4m3"),
    ]
]


@every_isa
def test_a_stepwise_norm_has_the_bits_of_the_reference(isa: str) -> None:
    """Up to the order of the sum, which a rounding hides nearly always: one row in a hundred may differ."""
    library, x = kernels(isa), torch.randn(400, 16, 64).bfloat16()
    got = norm_cpu.rms_norm(x, None, eps=1e-6, stepwise=True, kernels=library)
    want = norm_reference.rms_norm(x, None, eps=1e-6, stepwise=True)
    assert float((got != want).any(dim=-1).float().mean()) < 0.01
    assert_close(got, want, tolerance(torch.bfloat16))


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant", QUANTS)
def test_rounding_has_the_bits_of_the_reference(quant: FakeQuant, dtype: torch.dtype, isa: str) -> None:
    """All magnitudes, exact ties, zeros of both signs, blocks that end early, channels behind `dims`."""
    library = kernels(isa)
    for rows, dim in itertools.product((1, 3, 200), (8, 100, 128, 512)):
        x = torch.randn(rows, dim) * torch.exp2(torch.randint(-30, 30, (rows, dim)).float())
        x[torch.rand(rows, dim) < 0.1] = -0.0
        for values in (x, torch.randint(-40, 40, (rows, dim)) / 16, torch.zeros(rows, dim)):
            for dims, tail in ((None, False), (dim // 2, True), (dim // 2, False), (0, True)):
                got = quant_cpu.fake_quant(values.to(dtype), quant, dims=dims, tail_bf16=tail, kernels=library)
                want = quant_reference.fake_quant(values.to(dtype), quant, dims=dims, tail_bf16=tail)
                assert torch.equal(got, want), (rows, dim, dims, tail)
                assert torch.equal(torch.signbit(got), torch.signbit(want))


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hadamard_rotation_has_the_bits_of_the_reference(dtype: torch.dtype, isa: str) -> None:
    for shape in [(1, 1), (3, 2), (7, 4), (2, 5, 8), (4, 16), (300, 128), (0, 32)]:
        x = torch.randn(*shape).to(dtype)
        assert torch.equal(hadamard_cpu.hadamard(x, kernels=kernels(isa)), hadamard_reference.hadamard(x)), shape


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("streams", [1, 2, 3, 4, 8])
def test_mixing_coefficients_are_the_reference(streams: int, dtype: torch.dtype, isa: str) -> None:
    """After many rounds it is forgotten how they began; two show it."""
    library = kernels(isa)
    for rows, width, (eps, rounds) in itertools.product((0, *ROWS), (33, 256), ((1e-3, 20), (0.05, 2))):
        x, count = torch.randn(rows, streams, width).to(dtype), streams * (2 + streams)
        weights = torch.randn(count, streams * width) * 0.1, torch.randn(3), torch.randn(count)
        options = {"norm_eps": 0.02, "hc_eps": eps, "rounds": rounds}
        got = mix_cpu.hyper_mix(x, *weights, kernels=library, **options)
        for mine, want in zip(got, mix_reference.hyper_mix(x, *weights, **options), strict=True):
            assert_close(mine, want, OP_FLOAT32, f"{rows} {width} {rounds}")


def test_stream_counts_without_a_kernel_are_refused() -> None:
    x = torch.randn(2, 9, 8)
    with pytest.raises(DeviceError, match="up to 8 streams, not 9"):
        mix_cpu.hyper_mix(x, torch.ones(99, 72), torch.ones(3), torch.ones(99), norm_eps=0.0, hc_eps=0.0, rounds=1)
    with pytest.raises(DeviceError, match="up to 8 streams, not 9"):
        expand_cpu.hyper_expand(torch.ones(1, 8), torch.ones(1, 9, 8), torch.ones(1, 9), torch.ones(1, 9, 9))


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_units_and_their_sums_are_the_reference(dtype: torch.dtype, isa: str) -> None:
    library = kernels(isa)
    for rows, width in itertools.product((0, 1, 5, 300), (1, 33, 128)):
        gate, up = (torch.randn(rows, width).to(dtype) * 4 for _ in range(2))
        got = swiglu_cpu.swiglu(gate, up, limit=2.5, kernels=library)
        assert_close(got, swiglu_reference.swiglu(gate, up, limit=2.5), tolerance(dtype), f"{rows} {width}")
        routed = torch.randn(rows, width)
        got = shared_cpu.add_shared(routed, up, kernels=library)
        assert got.dtype == dtype and torch.equal(got, shared_reference.add_shared(routed, up)), f"{rows} {width}"
    odd = torch.tensor([[float("nan"), -200.0, 300.0]], dtype=dtype)
    got = swiglu_cpu.swiglu(odd, odd.flip(1), limit=2.5, kernels=library)
    assert torch.isnan(got[0, [0, 2]]).all() and abs(got[0, 1]) < 1e-30


@every_isa
def test_ties_go_to_the_lowest_expert(isa: str) -> None:
    x = torch.zeros(3, 8)  # every score is the same
    bias = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    ids, _ = router_cpu.router_topk(x, torch.ones(6, 8), k=4, scale=1.0, bias_E=bias, kernels=kernels(isa))
    assert ids.tolist() == [[1, 3, 4, 0]] * 3


@every_isa
def test_large_scores_take_the_linear_branch(isa: str) -> None:
    """softplus(z) = z above 20, and no overflow at 200."""
    x = torch.tensor([[19.0], [21.0], [200.0], [-50.0]])
    options = {"k": 1, "scale": 1.0, "bias_E": None, "forced_TK": torch.zeros(4, 1, dtype=torch.int32)}
    _, weights = router_cpu.router_topk(x, torch.ones(2, 1), kernels=kernels(isa), **options)
    assert torch.equal(weights, torch.ones(4, 1))
