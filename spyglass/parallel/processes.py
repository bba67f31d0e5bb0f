"""A group of processes over torch's collectives: gloo on a CPU, NCCL on GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spyglass.parallel.group import Group

_MEET_S = 60.0
_ONE_SHOT = 1 << 17  # elements: a sum of more is divided among more than two processes first


class ProcessGroup(Group):
    """Process `rank` of `size`, which meet at `store`; gloo on a CPU, NCCL on GPUs.

    What fails because another process has ended raises RuntimeError; so does waiting longer than `timeout_s`.
    """

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, *, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self.capturable = device.type == "cuda"
        timeout = timedelta(seconds=timeout_s)
        self._group: Any  # torch declares a part of its methods
        options: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], timeout
            self._group = dist.ProcessGroupGloo(store, rank, size, options)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        if self.size == 2 or part.numel() <= _ONE_SHOT:
            return _in_order(self._gather(part))
        flat = torch.nn.functional.pad(part.reshape(-1), (0, -part.numel() % self.size))
        parts = torch.empty_like(flat)  # of this process's share, by rank
        self._group.alltoall_base(parts, flat, [], []).wait()
        whole = self._gather(_in_order(parts.view(self.size, -1)))
        return whole.view(-1)[: part.numel()].view(part.shape)

    def total(
        self, routed_TC: torch.Tensor, shared_TC: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.sum(routed_TC + shared_TC).to(dtype), None

    def join(self, part_RO: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        widest = max(widths)
        parts = self._gather(torch.nn.functional.pad(part_RO, (0, widest - part_RO.shape[1])))
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def largest(self, ids_R: torch.Tensor, values_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self._gather(torch.stack([values_R.double(), ids_R.double()]))  # both are exact in fp64
        best_R = parts[:, 0].argmax(0)  # the first of equals, which has the lowest ids
        values_R, ids_R = parts[best_R, :, torch.arange(len(best_R), device=best_R.device)].T
        return ids_R.long(), values_R.float()

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor], options).wait()
        return tensor

    def close(self) -> None:
        """See `Group`; what waits for the others fails."""
        self._group.abort()

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        """[size, ...], by rank."""
        out = part.new_empty(self.size * part.numel())
        self._group._allgather_base(out, part.reshape(-1)).wait()
        return out.view(self.size, *part.shape)


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def meet(folder: str, rank: int, size: int, device: torch.device, *, timeout_s: float) -> ProcessGroup:
    """Process `rank` of `size` that all know an empty folder of their user; comes back when all have come."""
    module: Any = dist  # torch does not declare all that it exports
    store = module.FileStore(os.path.join(folder, "store"), size)
    store.set_timeout(timedelta(seconds=_MEET_S))
    group = ProcessGroup(store, rank, size, device, timeout_s=timeout_s)
    group.sum(torch.ones(1, device=device))
    return group
