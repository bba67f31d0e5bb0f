"""Fine-tuning every weight: fp32 masters behind the same modules, and a checkpoint in the format it came in.

Each micro-batch sees the masters as the file will hold them (FP8 and FP4 blocks, bf16), so packing at the end loses
nothing. Experts are balanced by the bias that only chooses; tables of experts and of memories, and indexers, stay as
they are. Several processes each hold the whole model and share the micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spyglass.checkpoint.load import load_into
from spyglass.checkpoint.match import match
from spyglass.checkpoint.safetensors import Checkpoint, open_checkpoint
from spyglass.checkpoint.save import SaveItem, save_checkpoint
from spyglass.config.model import ModelConfig
from spyglass.config.training import TrainConfig
from spyglass.engram.feed import EngramFeed
from spyglass.engram.store import open_engram
from spyglass.layers.build import BuildContext
from spyglass.lora.merge import copy_others, open_entry, specs_of, spelling_of, write_config
from spyglass.model import DTYPES, ModelOptions, VisionLanguageModel
from spyglass.ops.table import bind_ops
from spyglass.parallel.fsdp import Processes
from spyglass.params.table import Param, most_tensors, param_table
from spyglass.quant.codec import decode
from spyglass.quant.packed import Packed, WeightSlot
from spyglass.train.balance import BIASES, CountingRouter, ExpertLoads, balance
from spyglass.train.loop import ALONE, MicroLoss, Task, adamw
from spyglass.train.loss import step_logits, token_loss
from spyglass.train.masters import Masters
from spyglass.train.packing import Sample, pack

BALANCE_RATE = 1e-4  # how far a bias moves in a step; it chooses among scores of about 1


class FullRun:
    """A model whose weights are the masters of a checkpoint.

    Raises:
        CheckpointError, DeviceError: as `load_model`.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: TrainConfig,
        device: torch.device,
        *,
        progress: bool,
        processes: Processes = ALONE,
    ) -> None:
        self.config, self.device, self._options, self._processes = config, device, options, processes
        checkpoint = open_checkpoint(str(options.model), most_tensors(config))
        numerics = options.numerics
        if numerics == "auto":
            numerics = "reference" if checkpoint.has_packed_weights else "plain"
        dtype_name = "bfloat16" if options.dtype == "auto" else options.dtype
        self.dtype, self._state = DTYPES[dtype_name], ExpertLoads()
        self._engram: EngramFeed | None = None
        if config.text.engram is not None:
            self._engram = EngramFeed(open_engram(options.model, config), device=device, dtype=self.dtype)
        ops = bind_ops(device.type, dtype_name, "training").replaced(router_topk=CountingRouter(self._state))
        build = BuildContext(ops=ops, device=device, dtype=self.dtype)
        self.model = VisionLanguageModel(config, ModelOptions(build=build, numerics=numerics)).eval()
        specs = {name: spec for name, spec in param_table(config).items() if spec.kind != "table"}
        stored: dict[str, Packed] = {}
        slots = [
            WeightSlot(name, spec.shape, spec.kind, partial(stored.__setitem__, name), spec.optional)
            for name, spec in specs.items()
        ]
        load_into(slots, checkpoint, progress=progress)

        def initial(name: str, spec: Param) -> torch.Tensor:
            if name not in stored:  # an optional bias that the file does not have
                return torch.zeros(spec.shape)
            return stored[name].data if spec.kind == "index" else decode(stored[name], torch.float32)

        self.masters = Masters(self.model, specs, initial, fixed=BIASES)
        self._loads: list[torch.Tensor] = []

    def task(self, feed: Callable[[int], Sequence[Sample]], facts: Mapping[str, Any]) -> Task:
        """What the loop trains: stacks of weights of one shape and format."""
        values = {f"{stack.names[0]} and {len(stack.names) - 1}": stack.value for stack in self.masters.stacks}
        decayed = [stack.value for stack in self.masters.stacks if stack.rule == "matrix"]
        others = [stack.value for stack in self.masters.stacks if stack.rule != "matrix"]
        groups = [
            {
                "params": decayed,
                "lr": self._options.rate(self.config.text.hidden_size),
                "weight_decay": self._options.weight_decay,
            },
            {"params": others, "lr": self._options.rate(self.config.text.hidden_size), "weight_decay": 0.0},
        ]
        return Task(
            leaves=values,
            optimisers=[adamw(groups)],
            loss=lambda number: self._loss(feed(number)),
            extra={name: bias for name, bias in self.masters.fixed.items() if name.endswith(BIASES)},
            after_step=self._balance,
            facts=facts,
        )

    def _loss(self, samples: Sequence[Sample]) -> MicroLoss:
        self.masters.deliver()
        for stack, leaf in zip(self.masters.stacks, self.masters.leaves, strict=True):
            leaf.register_post_accumulate_grad_hook(partial(_collect, stack.value))
        step = pack(samples, self.config, device=self.device, dtype=self.dtype, engram=self._engram)
        tokens = len(step.batch.ids_T)
        self._state.real_T = torch.ones(tokens, dtype=torch.bool, device=self.device)
        counted: list[torch.Tensor] = []
        self._state.loads = counted
        value, targets = token_loss(step_logits(self.model, step), step.targets_R)
        self._state.loads = []  # layers that are computed again count for nothing
        self._loads = [a + b for a, b in zip(self._loads, counted, strict=True)] if self._loads else counted
        images = 0 if step.images is None else len(step.images.grids_I2)
        return MicroLoss(loss=value, targets=targets, tokens=tokens, images=images)

    @torch.no_grad()
    def logits(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Logits fp32 [R, V] of the rows that samples learn, with the weights as they are now; nothing is counted."""
        self.masters.deliver()
        step = pack(samples, self.config, device=self.device, dtype=self.dtype, engram=self._engram)
        self._state.real_T = torch.ones(len(step.batch.ids_T), dtype=torch.bool, device=self.device)
        self._state.loads = []
        return step_logits(self.model, step)

    def _balance(self, step: int) -> None:
        loads = [self._processes.total(load) for load in self._loads]
        balance(self.masters.fixed, loads, self.config.text, BALANCE_RATE)
        self._loads = []

    def write(self, output: Path) -> None:
        """The checkpoint as it is now, with tokenizer and configuration.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        specs, packed = self.masters.specs, self.masters.packed()
        items = [SaveItem(name, specs[name], weight.format, partial(_same, weight)) for name, weight in packed.items()]
        base = open_checkpoint(str(self._options.model), most_tensors(self.config))
        save_checkpoint(output, items + self._others(base), names=spelling_of(base))
        copy_others(self._options.model, output)
        write_config(self._options.model, output, plain=False)

    def _others(self, base: Checkpoint) -> list[SaveItem]:
        """Memory tables and draft stages, which are not trained, as they lie in the files of the model."""
        specs = specs_of(self.config, base)
        return [
            SaveItem(name, specs[name], source.format, partial(open_entry, source, specs[name]))
            for name, source in match(base, specs, skip=frozenset()).sources.items()
            if name not in self.masters.specs
        ]


def _collect(value: torch.Tensor, leaf: torch.Tensor) -> None:
    """The gradient of a micro-batch joins that of the step."""
    value.grad = leaf.grad if value.grad is None or leaf.grad is None else value.grad + leaf.grad
    leaf.grad = None


def _same(weight: Packed) -> Packed:
    return weight
