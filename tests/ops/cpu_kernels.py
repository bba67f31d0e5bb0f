"""Which compiled CPU kernels the tests run: the best instruction set of this machine, and when there is time all."""

from __future__ import annotations

import pytest
import torch

from spyglass.ops.build import isas, why_not
from spyglass.ops.native import Kernels, kernels_for
from tests.tolerance import OP_BFLOAT16, OP_FLOAT32, Tolerance

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 2, 3, 5, 9, 17, 64, 100, 257]
every_isa = pytest.mark.parametrize(
    "isa", [pytest.param(isa, marks=[pytest.mark.slow] if place else []) for place, isa in enumerate(isas())]
)


def kernels(isa: str) -> Kernels:
    """The library, or a skip that says why there is none."""
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no CPU kernels: {reason}")
    return kernels_for(isa)


def tolerance(dtype: torch.dtype) -> Tolerance:
    """How far a kernel may be from the reference."""
    return OP_FLOAT32 if dtype == torch.float32 else OP_BFLOAT16
