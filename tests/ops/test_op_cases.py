"""The calls that a GPU is asked to repeat, on this machine: what `auto` takes here gives what the reference gives."""

from __future__ import annotations

import pytest
import torch

from spyglass.ops.table import OPS, bind_ops
from tests.gpu.op_cases import CASES, Source, run_call
from tests.tolerance import OP_BFLOAT16, OP_FLOAT32, assert_close

DTYPES = {"float32": (torch.float32, OP_FLOAT32), "bfloat16": (torch.bfloat16, OP_BFLOAT16)}


def test_every_op_has_a_case() -> None:
    assert {op for op, _ in CASES} == set(OPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_what_runs_here_agrees_with_the_reference(op: str, case: str, dtype: str) -> None:
    chosen, tolerance = DTYPES[dtype]
    call = CASES[op, case](Source(chosen))
    expected = run_call(getattr(bind_ops("cpu", dtype, "reference"), op), call, "cpu")
    results = run_call(getattr(bind_ops("cpu", dtype, "auto"), op), call, "cpu")
    for result, want in zip(results, expected, strict=True):
        assert result.dtype == want.dtype and torch.isfinite(want.float()).all()
        if call.exact or not want.dtype.is_floating_point:
            assert torch.equal(result, want)
        else:
            assert_close(result, want, tolerance, f"{op} {case}")
