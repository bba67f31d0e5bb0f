"""Small tensors between host and device, without waiting for what the device has to do."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


def to_device(array: NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host array or tensor on a device, without waiting for what the device has to do."""
    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the host, or what will be it once an event that is recorded now has come."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
