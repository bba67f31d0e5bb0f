"""Whether a model fits into the memory that is free, from headers alone."""

from __future__ import annotations

import os

import torch

from spyglass.config.engine import EngineConfig
from spyglass.plan import host_memory, require_room


def require_fit(path: str | os.PathLike[str], place: torch.device, options: EngineConfig) -> None:
    """Refuse a model that would not fit before a byte of it is read.

    Raises:
        CapacityError: the weights are larger than the free memory.
    """
    if place.type == "cuda":
        unused = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)  # kept by torch for later use
        free = torch.cuda.mem_get_info(place)[0] + unused
    else:
        memory = host_memory()
        if memory.total == 0:  # a system that does not tell
            return
        free = memory.free
    beside = options.engram == "device" or (options.engram == "host" and place.type == "cpu")
    require_room(path, free, pictures=options.images > 0, expand=options.expand_weights, tables=beside)
