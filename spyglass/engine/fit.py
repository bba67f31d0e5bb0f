"""How much memory is free, and whether a model fits into it, from headers alone."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from spyglass.checkpoint.match import match
from spyglass.checkpoint.safetensors import open_checkpoint
from spyglass.config.engine import EngineConfig
from spyglass.config.model import ModelConfig
from spyglass.config.read import read_model_config
from spyglass.errors import CapacityError, ConfigError, DeviceError
from spyglass.lora.low_rank import AdapterFile
from spyglass.lora.peft import read_adapter
from spyglass.machine import host_memory, shared_memory
from spyglass.params.table import most_tensors, param_table
from spyglass.placement import PREFIX_SHARE, place_model
from spyglass.plan import require_memory

_LOG = logging.getLogger(__name__)
_UNKNOWN_SHARE = 1 << 30
_SHARED_BY_GPUS = 1 << 30  # NCCL has segments of 9.6 MB for each pair and channel; a container has 64 MB unless told


def free_memory(device: torch.device) -> int | None:
    """Bytes that could be allocated now; None on a system that does not tell."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # kept by torch for later use
        return torch.cuda.mem_get_info(device)[0] + unused
    memory = host_memory()
    return memory.free if memory.total else None


def total_memory(device: torch.device) -> int:
    """Bytes that the device has, in use or not; 0 on a system that does not tell."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host_memory().total


def prefix_bytes(device: torch.device) -> int:
    """What the prefix cache may take unless somebody says: an eighth of what is free, 1 GiB where nobody knows."""
    free = free_memory(device)
    return _UNKNOWN_SHARE if free is None else free // PREFIX_SHARE


def require_fit(
    path: str | os.PathLike[str], device: torch.device, options: EngineConfig, adapters: int = 0
) -> tuple[int, ...]:
    """Refuse a model that would not fit before a byte of it is read; `adapters`: bytes of those that come with it.

    Gives the layers whose routed experts are to stay in host memory.

    Raises:
        CapacityError: weights and adapters are larger than the free memory.
        ConfigError: experts were asked for in host memory, and the model is divided among processes.
    """
    if (device.type == "cuda" and options.experts_mode != "gpu") or options.experts_mode == "host":
        if options.tensor_parallel_size == 1:
            return _placed(path, device, options, adapters)
        if options.experts != "auto":
            raise ConfigError(
                f"experts is {options.experts!r} and tensor_parallel_size {options.tensor_parallel_size}: a divided "
                "model has its experts on the GPUs; leave one of both out"
            )
    free = free_memory(device)
    if free is None:
        return ()
    beside = options.engram == "device" or (options.engram == "host" and device.type == "cpu")
    require_memory(
        path,
        free,
        images=options.images > 0,
        expand=options.expand_weights,
        tables=beside,
        adapters=adapters,
        ranks=options.tensor_parallel_size,
        own_memory=device.type == "cuda",
    )
    return ()


def _placed(
    path: str | os.PathLike[str], device: torch.device, options: EngineConfig, adapters: int
) -> tuple[int, ...]:
    """Layers whose routed experts stay off `device`; on a CPU, where all memory is one, those that are treated so."""
    config = read_model_config(path)
    params = param_table(config)
    sources = match(open_checkpoint(os.fspath(path), most_tensors(config)), params).sources
    on_gpu, free = device.type == "cuda", None
    if on_gpu and (free := free_memory(device)) is not None and options.gpu_memory_utilization is not None:
        free = max(free - int(total_memory(device) * (1 - options.gpu_memory_utilization)), 0)
    found = place_model(
        config,
        sources,
        params,
        options,
        free=free,
        host_free=free_memory(torch.device("cpu")),
        adapters=adapters,
        on_gpu=on_gpu,
    )
    if found.host:
        _LOG.info("%s", found)
    return found.host


def require_devices(device: torch.device, size: int) -> None:
    """Raises DeviceError unless there is a GPU for each of so many processes, from `device` on; a CPU has room.

    A place for memory shared by GPUs that is as small as containers have it is told: NCCL does not say what it lacks.
    """
    count = torch.cuda.device_count() - (device.index or 0) if device.type == "cuda" else size
    if count < size:
        raise DeviceError(
            f"tensor_parallel_size is {size}, and torch sees {count} GPUs from {device} on; take as many, or device=cpu"
        )
    shared = shared_memory()
    if device.type == "cuda" and size > 1 and shared is not None and shared < _SHARED_BY_GPUS:
        _LOG.warning(
            "/dev/shm has %d MB free, %d MB less than NCCL may take where GPUs cannot read each other's memory: if it "
            "fails, give the container more (docker run --shm-size=1g)",
            shared >> 20,
            (_SHARED_BY_GPUS - shared) >> 20,
        )


def read_fitting(folder: Path, model: ModelConfig, device: torch.device) -> AdapterFile:
    """Read an adapter that is to go beside a `model` that is loaded.

    Raises:
        AdapterError: as `read_adapter`.
        CapacityError: it is larger than the free memory.
    """
    file, free = read_adapter(folder, model), free_memory(device)
    if free is not None and file.bank_bytes() > free:
        raise CapacityError(
            f"the adapter in {folder} takes {file.bank_bytes() / 1e9:.2f} GB and {free / 1e9:.2f} GB are free beside "
            "the model; remove another one, or begin with a lower cache_bytes"
        )
    return file
