"""Every Triton kernel, interpreted on the processor, gives what the reference gives, in fp32 and fp16.

The interpreter multiplies the bit patterns of bf16 products, so bf16 is for a GPU. Unwritten memory and what lies
around the inputs is NaN.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.ops.call import DTYPES, Source, assert_agrees, tolerance_of
from tests.ops.cases import CASES
from tests.ops.triton_lane import chosen, interpret, interpreted, triton_ops

pytest.importorskip("triton", "3.9", reason="older interpreters do not know numpy 2")
TRITON_CASES = [(op, case) for op, case in CASES if op in triton_ops()]


@pytest.fixture(scope="module")
def child() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=interpret) as pool:
        yield pool


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("op", "case"), TRITON_CASES)
def test_kernels_agree_with_the_reference(child: ProcessPoolExecutor, op: str, case: str, dtype: str) -> None:
    chosen = DTYPES[dtype]
    for rows in (1, 7, 37) if dtype == "float32" else (37,):
        results, expected = child.submit(interpreted, op, case, chosen, rows).result()
        call = CASES[op, case](Source(chosen, rows))
        if any(want.dtype == torch.bfloat16 for want in expected):  # cut off there, not rounded
            call, chosen = replace(call, exact=False), torch.bfloat16
        assert_agrees(call, results, expected, tolerance_of(chosen), f"{rows} rows")


@pytest.mark.parametrize(("entries", "k"), [(700, 513), (1200, 1024), (4700, 2048), (20_000, 2048), (2049, 2048)])
def test_many_entries_are_chosen_as_the_reference_chooses_them(
    child: ProcessPoolExecutor, entries: int, k: int
) -> None:
    """Rows read at once, in parts and by groups, of which there are fewer than entries to choose."""
    got, want = child.submit(chosen, entries, k).result()
    assert torch.equal(got, want)
