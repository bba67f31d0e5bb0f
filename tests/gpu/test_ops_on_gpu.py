"""Every op on a GPU, reference, what `auto` takes there and what trains, gives what the reference gives on the host."""

from __future__ import annotations

import pytest
import torch

from spyglass.ops.table import Which, bind_ops
from spyglass.quant.formats import BF16
from spyglass.quant.packed import Packed
from tests.ops.call import DTYPES, Source, assert_agrees, poisoned, run_call, tolerance_of
from tests.ops.cases import CASES, TRAINED
from tests.tolerance import OP_FLIPPED

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("which", ["reference", "auto", "training"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("op", "case"), CASES)
def test_the_gpu_agrees_with_the_host(op: str, case: str, dtype: str, which: Which) -> None:
    if which == "training" and (op, case) not in TRAINED:
        pytest.skip("codes have no gradient")
    run = getattr(bind_ops("cuda", dtype, which), op)
    for rows in (1, 37, 300):
        call = CASES[op, case](Source(DTYPES[dtype], rows))
        tolerance = tolerance_of(DTYPES[dtype])
        if op == "experts_grouped" and (dtype == "bfloat16" or call.options["rounding"] is not None):
            tolerance = OP_FLIPPED
        expected = run_call(getattr(bind_ops("cpu", dtype, "reference"), op), call)
        results = run_call(run, call, "cuda", poisoned)
        assert all(result.device.type == "cuda" for result in results)
        assert_agrees(call, results, expected, tolerance, f"{op} {case}, {rows} rows")


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32])
def test_a_bias_joins_a_bfloat16_product_before_the_one_rounding(bias_dtype: torch.dtype) -> None:
    """257 is no bf16 number: rounded first it is 256, and 0.5 more changes nothing; 257.5 is nearer to 258."""
    linear = bind_ops("cuda", "bfloat16").linear_block
    for inner in (16, 1024, 9216):
        x = torch.zeros(300, inner, dtype=torch.bfloat16, device="cuda")
        x[:, 0], x[:, -1] = 256, 1
        weight = Packed(BF16, torch.ones(64, inner, dtype=torch.bfloat16, device="cuda"), None, (64, inner))
        bias = torch.full((64,), 0.5, dtype=bias_dtype, device="cuda")
        assert (linear(x, weight, bias_O=bias) == 258).all()
        assert (linear(x, weight) == 256).all()
        assert (linear(x, weight, out_dtype=torch.float32) == 257).all()
