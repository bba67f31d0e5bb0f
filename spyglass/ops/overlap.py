"""How a kernel begins that was launched with `gpu.overlap`; importing it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin(OVERLAPS: tl.constexpr) -> None:
    """Let the next kernel be launched, and wait for what the kernels before have written.

    Before this a program may read weights only; every program calls it, whatever it does then.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
