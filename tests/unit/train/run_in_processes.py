"""A short run of adapters on a small model, alone or as one of several processes that torchrun started:
`python -m tests.unit.train.run_in_processes FAMILY DEVICE FOLDER [apart]`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from spyglass.engram.feed import EngramFeed
from spyglass.parallel.fsdp import Processes, end_worker, init_workers, leave_workers
from spyglass.train.loop import LoopOptions, MicroLoss, Task, adamw, train
from spyglass.train.loss import step_logits, token_loss
from spyglass.train.packing import pack
from spyglass.train.recompute import recompute_layers
from spyglass.train.sharding import shard_layers
from tests import small_v41
from tests.unit.train.leaves import family
from tests.unit.train.samples import make_sample
from tests.unit.train.test_gradients import adapter_on

CHATS = ([4, (3, 5), 9], [30], [2, (2, 2), 4], [21])  # two micro-batches see no image, none fills the slowest pool


def run(name: str, device: str, folder: Path, processes: Processes, *, apart: bool = False) -> None:
    """Three steps of two micro-batches in float32, on packed weights.

    `apart`: each process goes on with the run in a folder of its own, named after its rank.
    """
    model = family(name, packed=True, expand=False, device=device)
    recompute_layers(model)
    feed = None
    if name == "v41":
        feed = EngramFeed(small_v41.small_store(model.config), device=torch.device(device), dtype=torch.float32)
    adapter = adapter_on(model)
    leaves = dict(adapter.parameters) if processes.count == 1 else shard_layers(model, adapter, processes)

    def loss(number: int) -> MicroLoss:
        sample = make_sample(model.config, CHATS[number % len(CHATS)], seed=number)
        step = pack(
            [sample], model.config, device=device, dtype=torch.float32, adapter_id=adapter.adapter_id, engram=feed
        )
        value, targets = token_loss(step_logits(model, step), step.targets_R)
        return MicroLoss(loss=value, targets=targets, tokens=len(step.batch.ids_T))

    group = {"params": list(leaves.values()), "lr": 0.01, "weight_decay": 0.0}
    task = Task(leaves=leaves, optimisers=[adamw([group])], loss=loss)
    options = LoopOptions(steps=3, accumulate=2)
    if apart:
        train(task, options, folder / str(processes.rank), resume=True, processes=processes, progress=False)
    else:
        train(task, options, folder, processes=processes, progress=False)


if __name__ == "__main__":
    processes = init_workers(sys.argv[2])
    try:
        run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), processes, apart="apart" in sys.argv)
    finally:
        leave_workers()
    if processes.count > 1:
        end_worker(0)
