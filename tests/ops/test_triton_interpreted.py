"""Every Triton kernel, interpreted on the processor, gives what the reference gives, in fp32 and fp16.

The interpreter multiplies the bit patterns of bf16 products, so bf16 is for a GPU. Unwritten memory and what lies
around the inputs is NaN.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from tests.gpu.op_cases import CASES
from tests.ops.triton_lane import interpret, interpreted, triton_ops
from tests.tolerance import OP_BFLOAT16, OP_FLOAT32, assert_close

pytest.importorskip("triton", "3.9", reason="older interpreters do not know numpy 2")
TRITON_CASES = [(op, case) for op, case in CASES if op in triton_ops()]
DTYPES = {"float32": (torch.float32, OP_FLOAT32), "float16": (torch.float16, OP_BFLOAT16)}


@pytest.fixture(scope="module")
def child() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=interpret) as pool:
        yield pool


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "case"), TRITON_CASES)
def test_kernels_agree_with_the_reference(child: ProcessPoolExecutor, op: str, case: str, dtype: str) -> None:
    chosen, tolerance = DTYPES[dtype]
    results, expected = child.submit(interpreted, op, case, chosen).result()
    assert len(results) == len(expected)
    for result, want in zip(results, expected, strict=True):
        assert result.dtype == want.dtype
        if not want.dtype.is_floating_point:
            assert torch.equal(result, want)
        else:
            assert_close(result, want, tolerance, f"{op} {case}")
