"""What kernels ask about the GPU they are launched on; importing this needs neither Triton nor a GPU."""

from __future__ import annotations

import torch

# Bytes of shared memory that one program may ask for, by compute capability (CUDA programming guide)
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


def generation() -> int:
    """Compute capability of the current GPU as one number, 90 for 9.0; from Triton's driver, which tests replace."""
    from triton.runtime import driver

    return int(driver.active.get_current_target().arch)


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of `device`; those of an H200 where tensors have no device."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
