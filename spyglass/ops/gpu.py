"""What kernels ask about the GPU they are launched on; importing this needs neither Triton nor a GPU."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import torch

# Bytes of shared memory that one program may ask for, by compute capability (CUDA programming guide)
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
MEASURED = frozenset({90})  # generations on which the kernels have run and were tuned


def generation() -> int:
    """Compute capability of the current GPU as one number, 90 for 9.0; from Triton's driver, which tests replace."""
    from triton.runtime import driver

    return int(driver.active.get_current_target().arch)


def standing(capability: tuple[int, int]) -> str:
    """What is known of the Triton kernels on GPUs of this compute capability, in words."""
    found = 10 * capability[0] + capability[1]
    if found in MEASURED:
        return "measured"
    return "compiles, not run" if found in SHARED_MEMORY else "not known"


def roomy() -> bool:
    """Whether a program may have well more than 100 KB of shared memory: generations for data centres."""
    return SHARED_MEMORY.get(generation(), 0) > 160_000


def interpreted() -> bool:
    """Whether Triton interprets kernels, which knows no assembly and no bf16 products."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def multiplies(dtype: torch.dtype) -> bool:
    """Whether products with packed weights are exact in this dtype: bf16, and fp32 in place of it when interpreted."""
    return dtype == (torch.float32 if interpreted() else torch.bfloat16)


def trains(*tensors: torch.Tensor | None) -> bool:
    """Whether kernels with a backward of their own take these: on a GPU, or interpreted; fp64 is for references."""
    given = [x for x in tensors if x is not None]
    on_gpu = all(x.is_cuda for x in given)
    here = on_gpu or ("triton" in sys.modules and interpreted() and all(x.device.type == "cpu" for x in given))
    return here and all(x.dtype != torch.float64 for x in given)


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of `device`; where tensors have none, of the GPU stood in for."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    from triton.runtime import driver

    return int(driver.active.processors)


def usable(device_type: str, dtype: str) -> bool:
    """Wherever Triton is: the answer of most Triton implementations."""
    return device_type == "cuda" and find_spec("triton") is not None


def learns(*tensors: torch.Tensor | None) -> bool:
    """Whether a gradient is wanted of any of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def overlap(x: torch.Tensor) -> dict[str, bool]:
    """Launch options of a kernel that may begin before the one before it has ended, and calls `begin` (overlap.py).

    Programmatic dependent launch: data centre GPUs from compute capability 9.0 on have it.
    """
    if x.device.type == "cpu" or generation() not in (90, 100):
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}
