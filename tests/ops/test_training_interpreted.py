"""Kernels of training, interpreted on the processor, have the values and the gradients of the reference, in fp32.

Unwritten memory is NaN. Products are torch's own; how fp32 numbers are cut for bf16 ones is checked apart.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from tests.ops.training_cases import CASES, compared, cut_numbers
from tests.ops.triton_lane import interpret
from tests.tolerance import CUT_PRODUCTS, OP_FLOAT32, assert_close

pytest.importorskip("triton", "3.9", reason="older interpreters do not know numpy 2")


@pytest.fixture(scope="module")
def child() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=interpret) as pool:
        yield pool


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_reference(child: ProcessPoolExecutor, case: str) -> None:
    for parts in (1, 3) if case in ("maps", "experts") else (1,):
        for label, found, expected in child.submit(compared, case, parts).result():
            assert_close(found, expected, OP_FLOAT32, label)


def test_fp32_numbers_are_cut_for_bf16_products_without_loss(child: ProcessPoolExecutor) -> None:
    whole, each, found, expected = child.submit(cut_numbers).result()
    assert torch.equal(each.double().sum(dim=-1), whole.double())
    assert torch.equal(each.to(torch.bfloat16).float(), each)
    assert_close(found, expected, CUT_PRODUCTS)
