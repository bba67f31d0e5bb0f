"""Compiled row-wise ops against the reference: norms, rotation, rounding, streams, pooling, routing, cache writes."""

from __future__ import annotations

import itertools

import pytest
import torch

from spyglass.errors import DeviceError
from spyglass.ops.add_shared import cpu as shared_cpu
from spyglass.ops.add_shared import reference as shared_reference
from spyglass.ops.cache_write import cpu as cache_cpu
from spyglass.ops.cache_write import reference as cache_reference
from spyglass.ops.compress_pool import cpu as pool_cpu
from spyglass.ops.compress_pool import reference as pool_reference
from spyglass.ops.compress_rows import cpu as rows_cpu
from spyglass.ops.compress_rows import reference as rows_reference
from spyglass.ops.fake_quant import cpu as quant_cpu
from spyglass.ops.fake_quant import reference as quant_reference
from spyglass.ops.hadamard import cpu as hadamard_cpu
from spyglass.ops.hadamard import reference as hadamard_reference
from spyglass.ops.hyper_collapse import cpu as collapse_cpu
from spyglass.ops.hyper_collapse import reference as collapse_reference
from spyglass.ops.hyper_expand import cpu as expand_cpu
from spyglass.ops.hyper_expand import reference as expand_reference
from spyglass.ops.hyper_head import cpu as head_cpu
from spyglass.ops.hyper_head import reference as head_reference
from spyglass.ops.hyper_mix import cpu as mix_cpu
from spyglass.ops.hyper_mix import reference as mix_reference
from spyglass.ops.rms_norm import cpu as norm_cpu
from spyglass.ops.rms_norm import reference as norm_reference
from spyglass.ops.rope_partial import cpu as rope_cpu
from spyglass.ops.rope_partial import reference as rope_reference
from spyglass.ops.router_topk import cpu as router_cpu
from spyglass.ops.router_topk import reference as router_reference
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
SHAPES = [(1, 1), (3, 7), (5, 4, 33), (2, 16, 512), (257, 1024), (0, 8)]


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_the_reference(dtype: torch.dtype, isa: str) -> None:
    library = kernels(isa)
    for shape in SHAPES:
        x, weight = torch.randn(*shape).to(dtype), torch.randn(shape[-1])
        for w, eps in itertools.product((weight, weight.to(dtype), None), (1e-6, 1e-20)):
            got = norm_cpu.rms_norm(x, w, eps=eps, kernels=library)
            assert_close(got, norm_reference.rms_norm(x, w, eps=eps), tolerance(dtype), f"{shape}")
    assert not norm_cpu.rms_norm(torch.zeros(2, 9, dtype=dtype), None, eps=1e-20, kernels=library).any()


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
def test_a_rotation_is_the_reference(dtype: torch.dtype, isa: str) -> None:
    library = kernels(isa)
    for rows, (heads, dim, pairs) in itertools.product((1, 3, 100), [((16,), 512, 32), ((3,), 10, 3), ((), 24, 12)]):
        x, angle = torch.randn(rows, *heads, dim).to(dtype), torch.randn(rows, pairs) * 9
        for inverse in (False, True):
            got = rope_cpu.rope_partial(x, angle.cos(), angle.sin(), inverse=inverse, kernels=library)
            want = rope_reference.rope_partial(x, angle.cos(), angle.sin(), inverse=inverse)
            assert_close(got, want, tolerance(dtype), f"{rows} {heads} {dim}")
            assert torch.equal(got[..., : -2 * pairs], x[..., : -2 * pairs])


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


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("streams", [1, 3, 4])
def test_the_last_weights_of_streams_are_the_reference(streams: int, dtype: torch.dtype, isa: str) -> None:
    for rows, width in itertools.product((0, *ROWS), (33, 256)):
        x = torch.randn(rows, streams, width).to(dtype) / 9
        weights = torch.randn(streams, streams * width) * 0.1, torch.randn(1), torch.randn(streams)
        options = {"norm_eps": 0.02, "hc_eps": 0.05}
        got = head_cpu.hyper_head(x, *weights, kernels=kernels(isa), **options)
        assert_close(got, head_reference.hyper_head(x, *weights, **options), OP_FLOAT32, f"{rows} {width}")


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_streams_are_read_and_written_as_the_reference_does(dtype: torch.dtype, isa: str) -> None:
    library = kernels(isa)
    for rows, streams, width in itertools.product((0, 1, 5, 100), (1, 2, 4, 7), (3, 256)):
        x, z = torch.randn(rows, streams, width).to(dtype), torch.randn(rows, width).to(dtype)
        pre, post, comb = torch.rand(rows, streams), torch.rand(rows, streams), torch.rand(rows, streams, streams)
        got = collapse_cpu.hyper_collapse(x, pre, kernels=library)
        assert_close(got, collapse_reference.hyper_collapse(x, pre), tolerance(dtype))
        got = expand_cpu.hyper_expand(z, x, post, comb, kernels=library)
        assert_close(got, expand_reference.hyper_expand(z, x, post, comb), tolerance(dtype))


def test_stream_counts_without_a_kernel_are_refused() -> None:
    x = torch.randn(2, 9, 8)
    with pytest.raises(DeviceError, match="up to 8 streams, not 9"):
        mix_cpu.hyper_mix(x, torch.ones(99, 72), torch.ones(3), torch.ones(99), norm_eps=0.0, hc_eps=0.0, rounds=1)
    with pytest.raises(DeviceError, match="up to 8 streams, not 9"):
        expand_cpu.hyper_expand(torch.ones(1, 8), torch.ones(1, 9, 8), torch.ones(1, 9), torch.ones(1, 9, 9))


@every_isa
@pytest.mark.parametrize("overlap", [False, True])
def test_pooling_is_the_reference(overlap: bool, isa: str) -> None:
    """Sources from this step, from the state and from nowhere; rows that nobody names are NaN."""
    library = kernels(isa)
    for entries, group, dim in itertools.product((0, 1, 40), (2, 8, 128), (5, 512)):
        width = dim * (4 if overlap else 2)
        rows, state = torch.randn(30, width) * 3, torch.randn(20, width)
        sources = torch.randint(-21, 30, (entries, group))
        sources[:, -1] = 3  # never nothing at all
        rows[7], state[4] = float("nan"), float("nan")
        sources[(sources == 7) | (sources == -6)] = -1
        got = pool_cpu.compress_pool(rows, state, sources.int(), overlap=overlap, kernels=library)
        want = pool_reference.compress_pool(rows, state, sources.int(), overlap=overlap)
        assert_close(got, want, OP_FLOAT32, f"{entries} {group} {dim}")
        narrow = pool_cpu.compress_pool(
            rows, state, sources.int(), overlap=overlap, out_dtype=torch.bfloat16, kernels=library
        )
        assert torch.equal(narrow, got.bfloat16()), f"{entries} {group} {dim}"
    alone = pool_cpu.compress_pool(rows, None, torch.full((1, 4), 2), overlap=overlap, kernels=library)
    assert_close(alone, pool_reference.compress_pool(rows, None, torch.full((1, 4), 2), overlap=overlap), OP_FLOAT32)


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
def test_rows_kept_for_a_group_have_the_bits_of_the_reference(isa: str) -> None:
    for rows, width in itertools.product((0, 1, 5, 300), (1, 33, 128)):
        kv, gate, ape = torch.randn(rows, width), torch.randn(rows, width), torch.randn(4, width)
        phase = torch.randint(0, 4, (rows,))
        for bias in (ape, None):
            got = rows_cpu.compress_rows(kv, gate, bias, phase, kernels=kernels(isa))
            assert torch.equal(got, rows_reference.compress_rows(kv, gate, bias, phase)), f"{rows} {width}"


@every_isa
def test_rows_are_written_where_they_belong_and_nowhere_else(isa: str) -> None:
    for page_dtype, row_dtype in itertools.product(DTYPES, DTYPES):
        for rows in (0, 1, 5, 300):
            pages = torch.randn(40, 10, 48).to(page_dtype)
            expected, x = pages.clone(), torch.randn(rows, 48).to(row_dtype)
            write = torch.where(torch.rand(rows) < 0.3, -1, torch.randperm(400)[:rows])
            cache_cpu.cache_write(pages, x, write, kernels=kernels(isa))
            cache_reference.cache_write(expected, x, write)
            assert torch.equal(pages, expected)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case", ["bias", "no bias", "pictures", "forced", "forced pictures", "forced table", "padding"]
)
def test_routing_is_the_reference(case: str, dtype: torch.dtype, isa: str) -> None:
    library = kernels(isa)
    for rows, (experts, width, k), weight_dtype in itertools.product(ROWS, [(64, 256, 6), (5, 40, 2)], DTYPES):
        x, weight = torch.randn(rows, width).to(dtype), (torch.randn(experts, width) * 0.3).to(weight_dtype)
        options = {"k": k, "scale": 1.5, "bias_E": None if case in ("no bias", "forced") else torch.randn(experts)}
        if "pictures" in case:
            options |= {"picture_T": torch.rand(rows) < 0.5, "bias_picture_E": torch.randn(experts)}
        if "forced" in case:
            options["forced_TK"] = torch.stack([torch.randperm(experts)[:k] for _ in range(rows)])
        if case == "forced table":
            options["forced_row_T"] = torch.randint(0, rows, (rows,))
        if case == "padding":
            options["positions_T"] = torch.randint(-1, 2, (rows,), dtype=torch.int32)
        ids, weights = router_cpu.router_topk(x, weight, kernels=library, **options)
        want_ids, want_weights = router_reference.router_topk(x, weight, **options)
        assert torch.equal(ids, want_ids) and ids.dtype == torch.int32
        assert_close(weights, want_weights, OP_FLOAT32)


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
