"""The largest output of a linear map is that of the whole product, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from spyglass.ops.linear_argmax import cpu
from spyglass.ops.linear_argmax.reference import linear_argmax
from spyglass.ops.linear_block import cpu as block_cpu
from spyglass.quant.codec import encode
from spyglass.quant.formats import BF16, F32, FP4, fp8
from spyglass.quant.packed import Packed
from tests.ops.cpu_kernels import DTYPES, ROWS, every_isa, kernels


def identity(values: torch.Tensor) -> tuple[torch.Tensor, Packed]:
    """x and a weight whose product is `values` [T, O]."""
    return torch.eye(len(values)), Packed(F32, values.mT.contiguous(), None, (values.shape[1], values.shape[0]))


def test_it_is_the_first_of_the_largest_that_are_not_skipped() -> None:
    x, weight = identity(torch.tensor([[1.0, 5.0, 5.0, 2.0], [7.0, 3.0, 9.0, 9.0], [-3.0, -1.0, -2.0, 0.0]]))
    for op in (linear_argmax, cpu.linear_argmax):
        if op is cpu.linear_argmax:
            kernels("plain")
        places, values = op(x, weight, torch.tensor([False, False, False, True]))
        assert places.tolist() == [1, 2, 1] and values.tolist() == [5.0, 9.0, -1.0]
        assert places.dtype == torch.int64 and values.dtype == torch.float32


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [F32, BF16, fp8((128, 128)), FP4], ids=str)
def test_it_has_the_bits_of_the_whole_product(format: object, dtype: torch.dtype, isa: str) -> None:
    """Rows from few to several panels, outputs in several tasks, some of the best skipped."""
    library = kernels(isa)
    for rows, (outs, width) in itertools.product(ROWS, [(70, 128), (3000, 64)]):
        weight = encode(torch.randn(outs, width), format)  # type: ignore[arg-type]
        x = torch.randn(rows, width).to(dtype)
        whole = block_cpu.linear_block(x, weight, out_dtype=torch.float32, kernels=library)
        skip = torch.zeros(outs, dtype=torch.bool)
        skip[whole.argmax(dim=-1)[::2]] = True
        skip[0] = True
        expected = whole.masked_fill(skip, float("-inf")).max(dim=-1)
        places, values = cpu.linear_argmax(x, weight, skip, kernels=library)
        assert torch.equal(values, expected.values) and torch.equal(places, expected.indices), f"{rows} {outs}"


@every_isa
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40])
def test_of_equals_the_first_and_a_nan_before_all(rows: int, isa: str) -> None:
    library = kernels(isa)
    weight = torch.ones(2500, 32)
    skip = torch.zeros(2500, dtype=torch.bool)
    skip[:3] = True
    places, values = cpu.linear_argmax(
        torch.ones(rows, 32), Packed(F32, weight, None, (2500, 32)), skip, kernels=library
    )
    assert places.tolist() == [3] * rows and values.tolist() == [32.0] * rows
    weight[[1, 70, 2000]] = float("nan")
    weight[100] = float("inf")
    places, values = cpu.linear_argmax(
        torch.ones(rows, 32), Packed(F32, weight, None, (2500, 32)), skip, kernels=library
    )
    assert places.tolist() == [70] * rows and values.isnan().all()
    skip[:] = True
    places, values = cpu.linear_argmax(
        torch.ones(rows, 32), Packed(F32, weight, None, (2500, 32)), skip, kernels=library
    )
    assert values.tolist() == [float("-inf")] * rows
