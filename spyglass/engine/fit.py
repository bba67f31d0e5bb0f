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
from spyglass.params.table import most_tensors, param_table
from spyglass.placement import expert_bytes, place_experts
from spyglass.plan import USABLE, cache_bytes, host_memory, require_room, step_bytes, weight_bytes

PREFIX_SHARE = 8  # of free memory, what the prefix cache may take
DRAWING = 24  # bytes a logit: itself, a copy for log-probabilities, weights, their sums in float64
_LONG = 1 << 17  # tokens of one sequence for which there should be room
_GRAPHS = 2 << 30  # bytes of captured steps
_LOG = logging.getLogger(__name__)
_UNKNOWN_SHARE = 1 << 30


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
    require_room(
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
    by_layer = expert_bytes(sources, params, expand=options.expand_weights)
    on_gpu, others = device.type == "cuda", 0
    for share, nbytes in weight_bytes(sources, params).items():
        here = {"experts": False, "vision": options.images > 0, "engram": options.engram == "device"}.get(share, True)
        others += (nbytes.expanded if options.expand_weights else nbytes.stored) if here else 0
    found = place_experts(
        by_layer,
        mode=options.experts_mode,
        most=options.experts_bytes,
        others=others + adapters,
        beside=beside_weights(config, options) if on_gpu else 0,
        free=free_memory(device) if on_gpu else None,
        host_free=free_memory(torch.device("cpu")),
    )
    if found.host:
        _LOG.info("%s", found)
    return found.host


def beside_weights(config: ModelConfig, options: EngineConfig) -> int:
    """The least bytes that a GPU should have beside the weights, by which `workspace.with_room` leaves some for rows.

    Rows of `max_sequences` sequences, one of them long; a step, captured graphs and caches, as far as can be told.
    """
    text, wide = config.text, 2 if options.dtype == "float32" else 1  # what is counted in bfloat16
    tokens = min(options.max_length or text.max_position_embeddings, _LONG)
    rows = cache_bytes(text, "float32" if wide == 2 else "bfloat16")
    least = options.cache_bytes or int(rows.per_token * tokens + rows.fixed * options.max_sequences)
    step = wide * step_bytes(config, options.max_step_tokens, options.max_sequences)
    drawing = options.max_sequences * text.vocab_size * DRAWING
    used = least + step + drawing + options.image_cache_bytes + _GRAPHS
    if options.prefix_cache_bytes is not None:
        return int((used + options.prefix_cache_bytes) / USABLE)
    return int(used / (USABLE - 1 / PREFIX_SHARE))


def require_devices(device: torch.device, size: int) -> None:
    """Raises DeviceError unless there is a GPU for each of so many processes, from `device` on; a CPU has room."""
    count = torch.cuda.device_count() - (device.index or 0) if device.type == "cuda" else size
    if count < size:
        raise DeviceError(
            f"tensor_parallel_size is {size}, and torch sees {count} GPUs from {device} on; take as many, or device=cpu"
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
