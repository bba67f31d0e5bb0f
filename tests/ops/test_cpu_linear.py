"""Compiled linear maps and experts against the reference: every format, instruction set, dtype and awkward size."""

from __future__ import annotations

import itertools

import pytest
import torch

from spyglass.errors import DeviceError
from spyglass.ops.build import isas
from spyglass.ops.experts_grouped import cpu as experts_cpu
from spyglass.ops.experts_grouped import reference as experts_reference
from spyglass.ops.linear_block import cpu as block_cpu
from spyglass.ops.linear_block import reference as block_reference
from spyglass.quant.codec import encode
from spyglass.quant.formats import BF16, F32, FP4, FakeQuant, Format, fp8
from spyglass.quant.packed import Packed
from tests.ops.cpu_kernels import DTYPES, ROWS, every_isa, kernels, tolerance
from tests.tolerance import OP_FLIPPED, assert_close

FORMATS = {
    "bf16": BF16,
    "f32": F32,
    "fp4": FP4,
    "fp8": fp8((128, 128)),
    "fp8 small blocks": fp8((32, 32)),
    "fp8 f32 scales": fp8((128, 128), "F32"),
}
E4M3 = FakeQuant(element="e4m3", block=128)
ROUNDINGS = [None, E4M3, FakeQuant(element="e4m3", block=32, scale="e4m3"), FakeQuant(element="e2m1", block=32)]


def weight(format: Format, *shape: int) -> Packed:
    """Values over several powers of two, so that neighbouring scales differ."""
    values = torch.randn(*shape) * torch.exp2(torch.randint(-6, 2, (*shape[:-1], 1)).float())
    return encode(values * shape[-1] ** -0.5, format)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_linear_map_is_the_reference(name: str, dtype: torch.dtype, isa: str) -> None:
    """Odd row counts, widths that fill no vector or block, every rounding, addend and bias."""
    library, format = kernels(isa), FORMATS[name]
    for rows, (width, outputs) in itertools.product(ROWS, [(256, 192), (160, 70), (32, 1), (1056, 130)]):
        w, x = weight(format, outputs, width), torch.randn(rows, width).to(dtype)
        for rounding in ROUNDINGS if rows in (3, 17) else ROUNDINGS[:2]:
            options = {"rounding": rounding, "addend_TO": torch.randn(rows, outputs), "bias_O": torch.randn(outputs)}
            got = block_cpu.linear_block(x, w, kernels=library, **options)
            want = block_reference.linear_block(x, w, **options)
            assert got.dtype == dtype
            assert_close(got, want, tolerance(dtype), f"{rows} x {width} x {outputs} {rounding}")


@every_isa
def test_widths_without_a_whole_vector_are_exact(isa: str) -> None:
    """Small integers: every product and sum is exact, so nothing of a tail may be lost or read twice."""
    library = kernels(isa)
    for width in [*range(1, 40), 63, 65, 127, 129, 200]:
        for format, dtype in itertools.product((BF16, F32), DTYPES):
            w = encode(torch.randint(-3, 4, (5, width)).float(), format)
            for rows in (1, 4, 20):
                x = torch.randint(-3, 4, (rows, width)).to(dtype)
                got = block_cpu.linear_block(x, w, out_dtype=torch.float32, kernels=library)
                assert torch.equal(got, x.float() @ w.data.float().T), (width, format.name, dtype, rows)


@every_isa
def test_any_number_of_outputs_and_rows_is_exact(isa: str) -> None:
    """Outputs are shared out in tasks, blocks and steps, rows in panels; small integers show a lost edge."""
    library = kernels(isa)
    for rows, outputs in itertools.product((9, 33, 64, 65), (1, 17, 600, 1100)):
        values = torch.randint(-3, 4, (outputs, 96)).float()
        x = torch.randint(-3, 4, (rows, 96)).float()
        got = block_cpu.linear_block(x, encode(values, BF16), kernels=library)
        assert torch.equal(got, x @ values.mT), (rows, outputs)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["bf16", "f32", "fp4"])
def test_an_output_has_the_same_bits_wherever_its_row_of_the_weight_lies(
    name: str, dtype: torch.dtype, isa: str
) -> None:
    """In a whole stretch of rows, which bf16 weights are multiplied from as they lie, or in what is left of one."""
    w, library = torch.randn(100, 320), kernels(isa)
    for rows in (9, 17, 40, 65):
        x = torch.randn(rows, 320).to(dtype)
        whole = block_cpu.linear_block(x, encode(w, FORMATS[name]), kernels=library)
        for first, stop in ((0, 15), (0, 17), (33, 100)):
            part = block_cpu.linear_block(x, encode(w[first:stop], FORMATS[name]), kernels=library)
            assert torch.equal(part, whole[:, first:stop]), f"{rows} {first} {stop}"


@every_isa
def test_outputs_larger_than_the_caches_are_exact(isa: str) -> None:
    """They are written past them, from whole aligned vectors; the logits of 32 rows are such an output."""
    for outputs in (65536, 65549):
        values = torch.randint(-8, 9, (outputs, 32)).float()
        x = torch.randint(-8, 9, (40, 32)).float()
        addend, bias = torch.randint(-8, 9, (40, outputs)).float(), torch.randint(-8, 9, (outputs,)).float()
        for dtype in DTYPES:
            w = encode(values, BF16)
            got = block_cpu.linear_block(
                x.to(dtype), w, addend_TO=addend, bias_O=bias, out_dtype=torch.float32, kernels=kernels(isa)
            )
            assert torch.equal(got, x @ values.mT + addend + bias), (outputs, dtype)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_fp8_code_and_scale_decodes_exactly(dtype: torch.dtype, isa: str) -> None:
    """One-hot rows read the matrix back: all 254 finite codes (subnormals too) under scales from 2^-90 to 2^90."""
    library = kernels(isa)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]
    data = codes.repeat(2, 256).view(256, 508)[:, :256].contiguous()
    for exponent in (0, -90, 90, 17):
        scale = torch.full((2, 2), 127 + exponent, dtype=torch.uint8)
        scale[1, 0] += 1
        w = Packed(fp8((128, 128)), data.view(torch.float8_e4m3fn), scale, (256, 256))
        for rows in (1, 256):
            x = torch.eye(256)[:rows].to(dtype)
            got = block_cpu.linear_block(x, w, out_dtype=torch.float32, kernels=library)
            assert torch.equal(got, block_reference.linear_block(x, w, out_dtype=torch.float32)), (exponent, rows)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_fp4_code_and_scale_decodes_exactly(dtype: torch.dtype, isa: str) -> None:
    library = kernels(isa)
    data = torch.arange(256, dtype=torch.uint8).repeat(64).view(128, 128)[torch.randperm(128)]
    scale = torch.randint(127 - 90, 127 + 90, (128, 8), dtype=torch.uint8)
    w = Packed(FP4, data.contiguous(), scale, (128, 256))
    for rows in (1, 3, 256):
        x = torch.eye(256)[:rows].to(dtype)
        got = block_cpu.linear_block(x, w, out_dtype=torch.float32, kernels=library)
        assert torch.equal(got, block_reference.linear_block(x, w, out_dtype=torch.float32)), rows


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_no_number_stands_for_reaches_every_product(dtype: torch.dtype, isa: str) -> None:
    """Codes of e4m3 that are NaN, of either sign, wherever they lie in a row; other rows stay as they are."""
    library, values = kernels(isa), torch.randn(40, 160)
    for code, place in itertools.product((0x7F, 0xFF), (0, 31, 77, 159)):
        w = encode(values, fp8((32, 32)))
        w.data.view(torch.uint8)[7, place] = code
        for rows in (1, 3, 8, 20):
            x = torch.randn(rows, 160).to(dtype)
            got = block_cpu.linear_block(x, w, out_dtype=torch.float32, kernels=library)
            assert got[:, 7].isnan().all() and not torch.cat([got[:, :7], got[:, 8:]], 1).isnan().any(), (place, rows)


@every_isa
def test_the_ends_of_the_e8m0_codes_are_2_to_the_minus_127_and_nan(isa: str) -> None:
    library, ones = kernels(isa), torch.full((3, 32), 0x22, dtype=torch.uint8)
    for code, value in ((0, 2.0**-127), (1, 2.0**-126), (254, 2.0**127), (255, float("nan"))):
        w = Packed(FP4, ones, torch.tensor([[127, code]] * 3, dtype=torch.uint8), (3, 64))
        power = -20.0 if code == 254 else 20.0
        for rows in (1, 20):
            x = torch.zeros(rows, 64)
            x[:, 32:] = 2.0**power
            got = block_cpu.linear_block(x, w, kernels=library)
            assert torch.equal(got.nan_to_num(7.0), torch.full((rows, 3), 32 * 2.0**power * value).nan_to_num(7.0)), (
                code
            )


@every_isa
def test_fp32_inputs_keep_all_their_digits(isa: str) -> None:
    """1 + 2^-12 is no bf16 number: a kernel that multiplies in bf16 would lose the difference."""
    library = kernels(isa)
    for format, rows in itertools.product((BF16, fp8((128, 128)), FP4), (1, 40)):
        x = torch.full((rows, 128), 1 + 2.0**-12)
        got = block_cpu.linear_block(x, encode(torch.ones(3, 128), format), kernels=library)
        assert torch.equal(got, torch.full((rows, 3), 128 + 2.0**-5)), format.name


@every_isa
def test_the_output_dtype_may_differ_from_the_input(isa: str) -> None:
    library, x, w = kernels(isa), torch.randn(2, 3, 64).bfloat16(), weight(BF16, 10, 64)
    got = block_cpu.linear_block(x, w, out_dtype=torch.float32, kernels=library)
    assert got.shape == (2, 3, 10) and got.dtype == torch.float32
    assert_close(got, block_reference.linear_block(x, w, out_dtype=torch.float32), tolerance(torch.float32))


@every_isa
def test_an_addend_joins_before_the_one_rounding(isa: str) -> None:
    library = kernels(isa)
    x, w = torch.ones(1, 32).bfloat16(), encode(torch.ones(1, 32) / 32, BF16)
    addend = torch.full((1, 1), 2.0**-8 + 2.0**-9)  # 1 + it rounds to 1 + 2^-7; rounded first, 1 stays behind
    got = block_cpu.linear_block(x, w, addend_TO=addend, kernels=library)
    assert float(got) == 1 + 2.0**-7


@every_isa
def test_strided_and_empty_inputs(isa: str) -> None:
    library, w = kernels(isa), weight(FP4, 48, 64)
    x = torch.randn(64, 9).bfloat16().T
    assert_close(
        block_cpu.linear_block(x, w, kernels=library), block_reference.linear_block(x, w), tolerance(torch.bfloat16)
    )
    assert block_cpu.linear_block(x[:0], w, kernels=library).shape == (0, 48)


def experts(format: Format, count: int, width: int, hidden: int) -> list[Packed]:
    return [weight(format, count, *shape) for shape in ((width, hidden), (width, hidden), (hidden, width))]


def routes(rows: int, count: int, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(count)[:chosen] for _ in range(rows)]).to(torch.int32)
    return torch.where(torch.rand(rows, chosen) < 0.1, -1, ids), torch.rand(rows, chosen)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rounding", [None, E4M3])
def test_experts_are_the_reference(name: str, dtype: torch.dtype, rounding: FakeQuant | None, isa: str) -> None:
    """Few and many rows per expert, experts that nobody chose, choices of nobody, a clamp that bites."""
    library = kernels(isa)
    for rows in ROWS:
        stacks = experts(FORMATS[name], 8, 160, 96)
        x, (ids, weights) = torch.randn(rows, 96).to(dtype) * 3, routes(rows, 8, 3)
        got = experts_cpu.experts_grouped(x, ids, weights, *stacks, limit=2.0, rounding=rounding, kernels=library)
        want = experts_reference.experts_grouped(x, ids, weights, *stacks, limit=2.0, rounding=rounding)
        assert got.dtype == torch.float32
        exact = dtype == torch.float32 and rounding is None
        assert_close(got, want, tolerance(dtype) if exact else OP_FLIPPED, f"{rows} rows")


@every_isa
@pytest.mark.parametrize("name", ["fp4", "fp8", "bf16"])
def test_a_row_of_an_expert_with_few_gets_the_bits_it_gets_alone(name: str, isa: str) -> None:
    library = kernels(isa)
    stacks = experts(FORMATS[name], 2, 96, 160)
    x = torch.randn(8, 160).bfloat16()
    ids, weights = torch.tensor([[1]] * 8, dtype=torch.int32), torch.rand(8, 1)
    alone = [
        experts_cpu.experts_grouped(x[t : t + 1], ids[:1], weights[t : t + 1], *stacks, limit=2.0, kernels=library)
        for t in range(8)
    ]
    for rows in range(1, 9):
        got = experts_cpu.experts_grouped(x[:rows], ids[:rows], weights[:rows], *stacks, limit=2.0, kernels=library)
        assert torch.equal(got, torch.cat(alone[:rows])), rows


@every_isa
def test_the_sum_over_experts_runs_in_ascending_order(isa: str) -> None:
    """Outputs 2^24, 1 and -2^24 of experts 0, 1, 2: only one order loses the 1, and a row with 2, 1, 0 has the same."""
    library = kernels(isa)
    up = encode(torch.ones(3, 1, 32) / 32, F32)
    down = encode(torch.tensor([2.0**24, 1.0, -(2.0**24)]).view(3, 1, 1).expand(3, 32, 1).contiguous(), F32)
    gate = encode(torch.ones(3, 1, 32), F32)
    for rows in (1, 60):
        x = torch.ones(rows, 32)
        for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
            ids = torch.tensor([order] * rows, dtype=torch.int32)
            options = {"limit": 100.0}
            got = experts_cpu.experts_grouped(x, ids, torch.ones(rows, 3), gate, up, down, kernels=library, **options)
            want = experts_reference.experts_grouped(x, ids, torch.ones(rows, 3), gate, up, down, **options)
            assert torch.equal(got, want), (rows, order)


@every_isa
def test_the_output_of_an_expert_is_rounded_before_the_sum(isa: str) -> None:
    """So with one choice a token the sum is a number of x's dtype."""
    stacks = experts(BF16, 3, 64, 32)
    for rows in (1, 60):
        ids = (torch.arange(rows) % 3)[:, None].int()
        x, weights = torch.randn(rows, 32).bfloat16(), torch.rand(rows, 1) + 0.5
        out = experts_cpu.experts_grouped(x, ids, weights, *stacks, limit=9.0, kernels=kernels(isa))
        assert out.all() and torch.equal(out, out.bfloat16().float()), rows


@every_isa
def test_rows_without_an_expert_are_zero(isa: str) -> None:
    stacks = experts(BF16, 4, 32, 64)
    for rows in (1, 70):
        ids = torch.full((rows, 2), -1, dtype=torch.int32)
        x = torch.full((rows, 64), float("nan"))
        got = experts_cpu.experts_grouped(x, ids, torch.ones(rows, 2), *stacks, limit=1.0, kernels=kernels(isa))
        assert torch.equal(got, torch.zeros(rows, 64))
    assert experts_cpu.experts_grouped(x[:0], ids[:0], torch.ones(0, 2), *stacks, limit=1.0).shape == (0, 64)


def test_a_block_narrower_than_a_group_is_refused() -> None:
    with pytest.raises(DeviceError, match="multiple of 32 inputs, not 16"):
        block_cpu.linear_block(torch.ones(1, 32), encode(torch.ones(16, 32), fp8((16, 16))))


def test_formats_of_one_layer_must_agree() -> None:
    w1, w3, w2 = experts(BF16, 2, 32, 32)
    with pytest.raises(DeviceError, match="one format for all three matrices, not bf16, f32 and bf16"):
        mixed = Packed(F32, w3.data.float(), None, w3.shape)
        ids = torch.zeros(1, 1, dtype=torch.int32)
        experts_cpu.experts_grouped(torch.ones(1, 32), ids, torch.ones(1, 1), w1, mixed, w2, limit=1.0)


@pytest.mark.skipif(isas()[0] != "amx_bf16", reason="this processor has no tile unit")
@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8 small blocks", "fp4"])
def test_on_tiles_a_row_has_the_same_bits_beside_any_number_of_others(name: str) -> None:
    """Alone, in a part of a tile, in several tiles, and where the weight is decoded once for all."""
    library, w = kernels("amx_bf16"), weight(FORMATS[name], 100, 1056)
    x = torch.randn(300, 1056).bfloat16()
    whole = block_cpu.linear_block(x, w, rounding=E4M3, out_dtype=torch.float32, kernels=library)
    for rows in (1, 2, 15, 16, 17, 33, 49, 64, 65, 130):
        part = block_cpu.linear_block(x[:rows], w, rounding=E4M3, out_dtype=torch.float32, kernels=library)
        assert torch.equal(part, whole[:rows]), rows


@pytest.mark.skipif(isas()[0] != "amx_bf16", reason="this processor has no tile unit")
def test_on_tiles_a_row_of_an_expert_has_the_same_bits_beside_any_number_of_others() -> None:
    library, stacks = kernels("amx_bf16"), experts(FP4, 2, 96, 160)
    x, weights = torch.randn(150, 160).bfloat16(), torch.rand(150, 1)
    ids = torch.tensor([[1]] * 150, dtype=torch.int32)

    def first(rows: int) -> torch.Tensor:
        given = x[:rows], ids[:rows], weights[:rows]
        return experts_cpu.experts_grouped(*given, *stacks, limit=2.0, kernels=library)

    whole = first(150)
    for rows in (1, 5, 16, 17, 64, 70):
        assert torch.equal(first(rows), whole[:rows]), rows
