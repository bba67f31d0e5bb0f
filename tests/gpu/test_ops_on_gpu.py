"""Every op on a GPU, reference and what `auto` takes there, gives what the reference gives on the host."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from spyglass.ops.table import bind_ops
from tests.gpu.op_cases import CASES, Source, run_call
from tests.tolerance import OP_BFLOAT16, OP_FLOAT32, assert_close

pytestmark = pytest.mark.gpu
DTYPES = {"float32": (torch.float32, OP_FLOAT32), "bfloat16": (torch.bfloat16, OP_BFLOAT16)}


@pytest.mark.parametrize("which", ["reference", "auto"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_the_gpu_agrees_with_the_host(op: str, case: str, dtype: str, which: Literal["reference", "auto"]) -> None:
    chosen, tolerance = DTYPES[dtype]
    call = CASES[op, case](Source(chosen))
    expected = run_call(getattr(bind_ops("cpu", dtype, "reference"), op), call, "cpu")
    results = run_call(getattr(bind_ops("cuda", dtype, which), op), call, "cuda")
    assert len(results) == len(expected)
    for result, want in zip(results, expected, strict=True):
        assert result.device.type == "cuda" and result.dtype == want.dtype
        if call.exact or not want.dtype.is_floating_point:
            assert torch.equal(result.cpu(), want)
        else:
            assert_close(result, want, tolerance, f"{op} {case}")
