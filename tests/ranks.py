"""Models that are divided among ranks, here threads of one process: what they do together is the real arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch

from spyglass.config.model import ModelConfig
from spyglass.layers.build import BuildContext
from spyglass.model import ModelOptions, VisionLanguageModel
from spyglass.ops.declare import Ops
from spyglass.ops.table import bind_ops
from spyglass.parallel.processes import ProcessGroup
from spyglass.params.shard import Shard
from spyglass.params.table import param_table
from spyglass.quant.packed import Packed

_R = TypeVar("_R")
# divides into 1, 2 and 4, in blocks of 32 where it is packed; the vocabulary of 70 does so unevenly
DIVISIBLE: dict[str, Any] = {
    "head_dim": 32,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_attention_heads": 8,
    "o_groups": 4,
    "o_lora_rank": 32,
}


class ThreadGroup(ProcessGroup):
    """One of several threads."""

    capturable = False

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meeting.exchange(self.rank, part))

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(self._meeting.exchange(self.rank, tensor)[0])


class Meeting:
    """Where threads hand each other tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._parts: list[Any] = [None] * size

    def exchange(self, rank: int, part: torch.Tensor) -> list[torch.Tensor]:
        self._parts[rank] = part.clone()
        self._barrier.wait()
        found = list(self._parts)
        self._barrier.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


def divided(
    config: ModelConfig,
    weights: Mapping[str, Packed],
    size: int,
    *,
    ops: Any = "reference",
    watched: Callable[[int, Ops], Ops] = lambda rank, ops: ops,
) -> list[VisionLanguageModel]:
    """A model's parts, filled from the whole weights, fp32; `watched` may wrap the ops of each."""
    meeting = Meeting(size)
    models = []
    for rank in range(size):
        shard = Shard(rank, size)
        build = BuildContext(
            ops=watched(rank, bind_ops("cpu", "float32", ops)),
            device=torch.device("cpu"),
            dtype=torch.float32,
            shard=shard,
            group=ThreadGroup(rank, meeting),
        )
        model = VisionLanguageModel(config, ModelOptions(build=build, numerics="plain")).eval()
        params = param_table(config)
        for slot in model.slots():
            slot.put(replace(part_of(weights[slot.name], slot.name, params[slot.name], shard), shape=slot.shape))
        models.append(model)
    return models


def part_of(whole: Packed, name: str, param: Any, shard: Shard) -> Packed:
    """One rank's part of a weight, cut as stored."""
    tensors = [whole.data] if whole.scale is None else [whole.data, whole.scale]
    cuts = list(shard.stored_cuts(name, param, whole.format))
    parts = [
        tensor if cut is None else tensor.narrow(cut.axis, cut.start, cut.stop - cut.start).contiguous()
        for tensor, cut in zip(tensors, cuts, strict=True)
    ]
    return Packed(whole.format, parts[0], parts[1] if len(parts) > 1 else None, shard.held(param).shape)


def on_all_ranks(models: list[VisionLanguageModel], run: Callable[[VisionLanguageModel], _R]) -> list[_R]:
    """The same on each rank at the same time."""
    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(run, models))
