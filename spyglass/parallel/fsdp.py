"""Several processes that train one model.

Sharding is PyTorch's FSDP2: between uses a process holds its part of a layer's tensors, packed as they are, and the
whole of them only while the layer runs. Processes are those that `torchrun` starts, on one machine or on many.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """This process among `count`, and what they do together; `mesh` None = there is only this one."""

    rank: int = 0
    count: int = 1
    mesh: DeviceMesh | None = None

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all processes, in each of them; the tensor itself is overwritten."""
        if self.mesh is not None:
            dist.all_reduce(value)
        return value

    def sum_gradients(self, leaves: Iterable[torch.Tensor]) -> None:
        """Make every gradient the sum over the processes: sharded ones are means, others are each process's own.

        What no micro-batch of the step reached (a tower, without images) has a gradient of zeros, with one process
        and with many.
        """
        for leaf in leaves:
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
            if isinstance(leaf, DTensor):
                _local(leaf.grad).mul_(self.count)
            else:
                leaf.grad = self.total(leaf.grad)

    def norm(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Euclidean norm of all gradients together, of which processes may hold parts."""
        if self.mesh is None:
            return torch.nn.utils.get_total_norm(grads)
        squares = [_local(grad).square().sum() for grad in grads if isinstance(grad, DTensor)]
        whole = [grad.square().sum() for grad in grads if not isinstance(grad, DTensor)]
        device = _local(grads[0]).device
        parts = self.total(torch.stack([torch.zeros((), device=device), *squares]).sum())
        return torch.stack([parts, *whole]).sum().sqrt()

    def scale(self, grads: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        torch._foreach_mul_([_local(grad) for grad in grads], factor)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of which processes may hold parts, whole; all processes must ask."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def like(self, leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """A whole `value` as this process holds `leaf`; what has another shape than `leaf` (a step count) stays."""
        if not isinstance(leaf, DTensor) or value.shape != leaf.shape:
            return value
        return distribute_tensor(value.to(leaf.device), leaf.device_mesh, leaf.placements, src_data_rank=None)

    def fill(self, leaf: torch.Tensor, value: torch.Tensor) -> None:
        """Overwrite `leaf`, in place, with a whole `value`."""
        leaf.copy_(self.like(leaf, value))

    def shard(
        self, module: nn.Module, tensors: Mapping[str, torch.Tensor], bind: Callable[[Mapping[str, torch.Tensor]], None]
    ) -> dict[str, torch.Tensor]:
        """Spread `tensors`, which `module` needs while it runs, over the processes; the result are the parts, by name.

        Whenever the module is called, `bind` gets the whole tensors first. Its first input must be a tensor. See
        `sum_gradients` for the gradients. The part of an integer tensor is one of its bits (`_as_floats`).
        """
        assert self.mesh is not None
        names = {name: f"shard_{number}" for number, name in enumerate(tensors)}
        integers = {name: (t.shape, t.dtype) for name, t in tensors.items() if not t.is_floating_point()}
        for name, tensor in tensors.items():
            held = _as_floats(tensor) if name in integers else tensor.detach()
            module.register_parameter(names[name], nn.Parameter(held, requires_grad=tensor.requires_grad))
        fully_shard(module, mesh=self.mesh)

        def gathered(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            whole: dict[str, torch.Tensor] = {name: module.get_parameter(place) for name, place in names.items()}
            bind(whole | {name: _from_floats(whole[name], *kind) for name, kind in integers.items()})
            trained = [tensor for tensor in whole.values() if tensor.requires_grad]
            touched = Touch.apply(inputs[0], *trained)  # type: ignore[no-untyped-call]
            return touched, *inputs[1:]

        module.register_forward_pre_hook(gathered)
        return {name: module.get_parameter(place) for name, place in names.items()}


class Touch(torch.autograd.Function):
    """x, and a gradient of zeros for tensors that a step may leave unused: all processes must send the same ones."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
        return grads[0], *zeros


def _as_floats(tensor: torch.Tensor) -> torch.Tensor:
    """An integer tensor's bits as float32 [bytes / 4, rounded up]; a view if they fill it and lie on its boundaries.

    FSDP2 of torch 2.11 takes no integers. float32, as gloo gathers no float8, and foreach copies on GPUs compute in
    float32: those of narrower formats round, which does not keep every NaN's bits.
    """
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if len(flat) % 4 or flat.storage_offset() % 4:
        flat = nn.functional.pad(flat, (0, -len(flat) % 4))
    return flat.view(torch.float32)


def _from_floats(floats: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The integer tensor whose bits `_as_floats` gave, as a view."""
    return floats.detach().view(torch.uint8)[: shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of it, as a view."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def init_workers(device_type: str) -> Processes:
    """The processes that `torchrun` started, on GPUs ("cuda", one each) or the host; without it, this one alone."""
    if not dist.is_torchelastic_launched():
        return Processes()
    if device_type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    # Whether to stop is a number of the host, also where the work is a GPU's.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
    count = dist.get_world_size()
    mesh = init_device_mesh(device_type, (count,)) if count > 1 else None
    return Processes(rank=dist.get_rank(), count=count, mesh=mesh)


def leave_workers() -> None:
    """End what `init_workers` began, after the last work of this process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def end_worker(code: int) -> NoReturn:
    """End one of several processes, after `leave_workers`, with this exit code and without the interpreter's clean-up.

    Threads of the group live on, since caches of PyTorch keep its mesh; one that lets go of a tensor while the
    interpreter ends aborts a process whose work is done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
