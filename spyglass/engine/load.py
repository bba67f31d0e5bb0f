"""A model in memory: in this process, or divided among several that this one starts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from spyglass.config.engine import EngineConfig
from spyglass.config.read import read_model_config
from spyglass.engine.cores import default_threads, spread_memory, torch_threads
from spyglass.engine.fit import require_devices
from spyglass.engine.ranks import Ranks
from spyglass.machine import usable_cores
from spyglass.model import LoadedModel, load_model
from spyglass.params.shard import Shard, require_even
from spyglass.params.table import param_table


def load_ranks(
    path: Path,
    options: EngineConfig,
    device: torch.device,
    *,
    progress: bool,
    host_experts: Sequence[int] = (),
    without: Sequence[str] = (),
) -> tuple[LoadedModel, Ranks | None]:
    """The model, or this process's part of it and the ranks that have the others.

    CPU threads are set for the whole process, and divided among the ranks unless their number is stated (`cores.py`).
    On processors, memory is spread over the machine's nodes, unless ranks have their own.

    Raises:
        ConfigError, CheckpointError, DeviceError: as `load_model`.
        RankError: another process failed.
    """
    size = options.tensor_parallel_size
    how: dict[str, Any] = {
        "path": path,
        "dtype": options.dtype,
        "numerics": options.numerics,
        "images": options.images > 0,
        "ops": options.ops,
        "vision_graphs": options.vision_graphs,
        "expand": options.expand_weights,
        "load": options.load,
        "without": tuple(without),
    }
    nodes = usable_cores().nodes if device.type == "cpu" and size == 1 else ()
    with spread_memory(nodes):  # the threads of the kernels, which begin here, take it over
        told, reads = torch_threads(), device.type == "cpu" or bool(host_experts)
        torch.set_num_threads(options.threads or default_threads(size, told=told, reads=reads))
        if size == 1:
            return load_model(**how, device=device, progress=progress, host_experts=host_experts), None
    require_even(param_table(read_model_config(path)), size)
    require_devices(device, size)
    ranks = Ranks(size, device, how, threads=torch.get_num_threads())
    with ExitStack() as stack:
        stack.callback(ranks.close)
        loaded = load_model(**how, device=device, progress=progress, shard=Shard(0, size), group=ranks.group)
        ranks.answers()  # all have their part
        stack.pop_all()
    return loaded, ranks
