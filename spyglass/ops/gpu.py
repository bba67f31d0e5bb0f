"""What kernels ask about the GPU they are launched on; importing this needs neither Triton nor a GPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What the rules of launches ask of a generation of GPU.

    `early`: a kernel may begin before the one before it has ended. Stages: tiles of weights on their way at once, of
    linear maps and of experts, as many as the shared memory of a program holds. `attention`:
    heads, keys and warps of a tile of the text; `tower_warps` for its heads of 128 channels.
    """

    early: bool = False
    linear_stages: int = 2
    expert_stages: int = 2
    attention: tuple[int, int, int] = (16, 32, 4)
    tower_warps: int = 8


_SMALL = Generation()
_LARGE = Generation(early=True, linear_stages=4, expert_stages=3, attention=(64, 64, 8), tower_warps=4)
GENERATIONS: Mapping[int, Generation] = {
    80: Generation(linear_stages=4, expert_stages=3),
    86: _SMALL,
    89: _SMALL,
    90: _LARGE,
    100: _LARGE,
    120: _SMALL,
}


def generation() -> int:
    """Compute capability of the current GPU as one number, 90 for 9.0; from Triton's driver, which tests replace."""
    from triton.runtime import driver

    return int(driver.active.get_current_target().arch)


def here() -> Generation:
    """The generation of the current GPU; one that is not known counts as a small one."""
    return GENERATIONS.get(generation(), _SMALL)


def interpreted() -> bool:
    """Whether Triton interprets kernels, which knows no assembly and no bf16 products."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def multiplies(dtype: torch.dtype) -> bool:
    """Whether products with packed weights are exact in this dtype: bf16, and fp32 in place of it when interpreted."""
    return dtype == (torch.float32 if interpreted() else torch.bfloat16)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def trains(*tensors: torch.Tensor | None) -> bool:
    """Whether kernels with a backward of their own take these: on a GPU, or interpreted; fp64 is for references."""
    given = [x for x in tensors if x is not None]
    on_gpu = all(x.is_cuda for x in given) and _has_triton()
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
    if x.device.type == "cpu" or not here().early:
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}
