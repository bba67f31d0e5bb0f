"""Every op over the table of cases: what runs on this machine gives what the reference gives."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch

from spyglass.ops.table import OPS, bind_ops, describe
from tests.ops.call import DTYPES, Source, assert_agrees, poisoned, run_call, tolerance_of
from tests.ops.cases import CASES
from tests.ops.cpu_kernels import ROWS, every_isa, kernels
from tests.tolerance import OP_FLIPPED

COMPILED = [(op, case) for op, case in CASES if describe("cpu", "bfloat16")[op] == "cpu"]
REFERENCE = bind_ops("cpu", "float32", "reference")


def test_every_op_has_a_case() -> None:
    assert {op for op, _ in CASES} == set(OPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_a_reference_reads_nothing_that_is_not_its_own(op: str, case: str, dtype: str) -> None:
    """What a case poisons never reaches a result; nor does it matter what lies around the inputs."""
    for rows in (1, 5, 37):
        call = CASES[op, case](Source(DTYPES[dtype], rows))
        want = run_call(getattr(REFERENCE, op), call)
        assert all(torch.isfinite(result.float()).all() for result in want)
        again = run_call(getattr(REFERENCE, op), call, place=poisoned)
        assert_agrees(call, again, want, tolerance_of(DTYPES[dtype]), f"{rows} rows")


@every_isa
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("op", "case"), COMPILED)
def test_a_compiled_kernel_agrees_with_the_reference(op: str, case: str, dtype: str, isa: str) -> None:
    """At every number of rows where kernels change their way of working."""
    kernel = partial(getattr(importlib.import_module(f"spyglass.ops.{op}.cpu"), op), kernels=kernels(isa))
    tolerance = tolerance_of(DTYPES[dtype])
    for rows in ROWS:
        call = CASES[op, case](Source(DTYPES[dtype], rows))
        rounded = op == "experts_grouped" and (dtype == "bfloat16" or call.options["rounding"] is not None)
        want = run_call(getattr(REFERENCE, op), call)
        results = run_call(kernel, call, place=poisoned)
        assert_agrees(call, results, want, OP_FLIPPED if rounded else tolerance, f"{rows} rows")
