"""Every Triton kernel compiles for every generation of GPU at its launch configurations, and fits into it."""

from __future__ import annotations

import pytest

from spyglass.ops.gpu import GENERATIONS as CONFIGURED
from tests.ops.triton_lane import GENERATIONS, SHARED_MEMORY, compile_op, kernels_of, launches_of, triton_ops

A_FEW_WORDS = 32  # bytes of stack; ptxas of Triton 3.6 keeps two registers there on sm_100 although many are free
pytest.importorskip("triton", reason="the development set-up installs Triton")


@pytest.mark.parametrize("op", triton_ops())
def test_every_triton_op_says_what_it_launches(op: str) -> None:
    assert any(launches_of(op)[0]()), f"write tests/ops/launches/{op}.py, or a function {op} in row_wise.py there"


def test_every_generation_that_launches_are_chosen_for_is_compiled_for() -> None:
    assert set(CONFIGURED) == set(GENERATIONS)


# 80 and 90 are the ends between which the others lie: the oldest, and the one with code of its own
SOON = (80, 90)
CHECKED = [pytest.param(one, marks=() if one in SOON else pytest.mark.slow) for one in GENERATIONS]


@pytest.mark.parametrize("generation", CHECKED)
@pytest.mark.parametrize("op", triton_ops())
def test_kernels_compile_and_fit(op: str, generation: int) -> None:
    compiled = compile_op(op, generation)
    for kernel in compiled:
        label = f"{kernel.kernel} on sm_{generation}: {kernel.settings}"
        assert kernel.shared <= SHARED_MEMORY[generation], f"{label}: {kernel.shared} bytes of shared memory"
        assert kernel.may_spill or kernel.frame <= A_FEW_WORDS, f"{label}: {kernel.frame} bytes of registers spilled"
    assert {kernel.kernel for kernel in compiled} >= kernels_of(op), "a kernel that no launch reaches"
