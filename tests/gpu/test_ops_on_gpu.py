"""Every op on a GPU, reference, what `auto` takes there and what trains, gives what the reference gives on the host."""

from __future__ import annotations

import pytest
import torch

from spyglass.ops.table import Which, bind_ops
from spyglass.quant.formats import BF16
from spyglass.quant.packed import Packed
from tests.gpu.op_cases import CASES, Source, run_call
from tests.tolerance import OP_BFLOAT16, OP_FLIPPED, OP_FLOAT32, assert_close

pytestmark = pytest.mark.gpu
DTYPES = {"float32": (torch.float32, OP_FLOAT32), "bfloat16": (torch.bfloat16, OP_BFLOAT16)}


@pytest.mark.parametrize("which", ["reference", "auto", "training"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_the_gpu_agrees_with_the_host(op: str, case: str, dtype: str, which: Which) -> None:
    chosen, tolerance = DTYPES[dtype]
    if which == "training" and op == "experts_grouped" and dtype == "bfloat16":
        tolerance = OP_FLIPPED
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
