"""A low-rank adapter as masters of the captured step: frozen weights, and pairs added to them, W + alpha/r · B A.

Serving multiplies a pair apart from its packed weight, with the input as it was before rounding; here the sum is one
weight of the activation dtype. The two differ by rounding alone, and the step keeps its few large products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from spyglass.checkpoint.load import load_into
from spyglass.checkpoint.safetensors import open_checkpoint
from spyglass.config.model import ModelConfig
from spyglass.engram.feed import EngramFeed
from spyglass.engram.store import open_engram
from spyglass.errors import AdapterError
from spyglass.lora.low_rank import AdapterFile, LowRank
from spyglass.model import VisionLanguageModel
from spyglass.ops.fake_quant.training import straight_through
from spyglass.params.declared import AdapterGroup
from spyglass.params.table import Param, param_table
from spyglass.params.targets import group_of
from spyglass.quant.codec import decode
from spyglass.quant.formats import BF16, F32
from spyglass.quant.packed import Packed, WeightSlot
from spyglass.train.masters import Masters, Stack, stored_values


def weights_of(folder: Path, config: ModelConfig) -> Callable[[str, Param], torch.Tensor]:
    """The values of a checkpoint by native name, what masters begin with; memory tables included.

    Raises:
        CheckpointError: as `load_into` and `open_engram`.
    """
    values: dict[str, torch.Tensor] = {}

    def keep(name: str, weight: Packed) -> None:
        values[name] = weight.data if weight.format.name == "i64" else decode(weight, torch.float32)

    specs = param_table(config)
    slots = [
        WeightSlot(name, spec.shape, spec.kind, lambda weight, name=name: keep(name, weight), spec.optional)
        for name, spec in specs.items()
        if spec.kind != "table"
    ]
    load_into(slots, open_checkpoint(folder), progress=False)
    if config.text.engram is not None:
        store = open_engram(folder, config)
        feed = EngramFeed(store, device=torch.device("cpu"), dtype=torch.float32)
        for layer, table in store.tables.items():
            values[f"layers.{layer}.engram.embed"] = feed.values_of(layer, np.arange(len(table.data)))

    def value(name: str, spec: Param) -> torch.Tensor:
        return values[name] if name in values else torch.zeros(spec.shape)

    return value


class PairMasters(Masters):
    """`stacks` are A [n, r, in] and B [n, out, r] in turn, for the matrices of the groups `targets` that share a shape
    and a format. They reach the model rounded to bf16, as they are saved. The other weights are handed over once."""

    def __init__(
        self,
        model: VisionLanguageModel,
        specs: Mapping[str, Param],
        initial: Callable[[str, Param], torch.Tensor],
        *,
        fixed: Sequence[str] = (),
        targets: Collection[AdapterGroup],
        rank: int,
        alpha: float,
        seed: int,
    ) -> None:
        super().__init__(model, specs, initial, fixed=fixed)
        with torch.no_grad():
            super().deliver()
        self.rank, self.alpha = rank, alpha
        self.bases = tuple(base for stack in self.stacks if (base := _targeted(stack, targets)).names)
        source = torch.Generator().manual_seed(seed)
        self.stacks = tuple(side for base in self.bases for side in _pair(base, rank, source))

    def begin_with(self, adapter: AdapterFile) -> None:
        """The pairs of an adapter of the same groups in place of fresh ones; rank rows that it does not use stay fresh.

        Its rank may be larger on disk, where two matrices share one A: rows whose column of B is zero are left out.

        Raises:
            AdapterError: it has other modules, or more rank rows.
        """
        names = {name for base in self.bases for name in base.names}
        if odd := sorted(names ^ adapter.modules.keys()):
            raise AdapterError(f"the adapter to begin with has other modules than this one, {odd[0]} among them")
        for base, a, b in zip(self.bases, self.stacks[::2], self.stacks[1::2], strict=True):
            for place, name in enumerate(base.names):
                pair = adapter.modules[name]
                used_R = pair.b_OR.any(dim=0)
                rank = int(used_R.sum())
                if rank > self.rank:
                    raise AdapterError(f"{name} of the adapter to begin with has rank {rank}, this one {self.rank}")
                a.value[place, :rank] = pair.a_RI[used_R].to(a.value)
                b.value[place, :, :rank] = pair.scale * self.rank / self.alpha * pair.b_OR[:, used_R].to(b.value)

    def deliver(self) -> None:
        """Hand the sums to the modules; their gradients reach `leaves`, new ones each time."""
        self.leaves = tuple(stack.value.detach().requires_grad_() for stack in self.stacks)
        sides = [straight_through(leaf, lambda value: stored_values(value, BF16)) for leaf in self.leaves]
        for base, a_NRI, b_NOR in zip(self.bases, sides[::2], sides[1::2], strict=True):
            values = base.value + self.alpha / self.rank * (b_NOR @ a_NRI)
            self._put(base, values if base.format == F32 else values.to(self._dtype))

    def adapter(self) -> AdapterFile:
        """The pairs in bf16, on the host, by native module name."""
        modules: dict[str, LowRank] = {}
        for base, a, b in zip(self.bases, self.stacks[::2], self.stacks[1::2], strict=True):
            sides = zip(a.value.cpu().bfloat16(), b.value.cpu().bfloat16(), strict=True)
            for name, (a_RI, b_OR) in zip(base.names, sides, strict=True):
                modules[name] = LowRank(a_RI=a_RI, b_OR=b_OR, alpha=self.alpha)
        return AdapterFile(modules=dict(sorted(modules.items())))


def _targeted(stack: Stack, targets: Collection[AdapterGroup]) -> Stack:
    """The matrices of a stack that belong to the groups, as the file has them. Experts of a layer stay together."""
    places = [place for place, name in enumerate(stack.names) if group_of(name) in targets]
    names = tuple(stack.names[n] for n in places)
    return Stack(names=names, format=stack.format, rule=stack.rule, value=stack.value[places])


def _pair(base: Stack, rank: int, source: torch.Generator) -> tuple[Stack, Stack]:
    """A uniform in ±1/sqrt(in), B zero, as PEFT begins."""
    count, outer, inner = base.value.shape
    a_NRI = (torch.rand((count, rank, inner), generator=source) * 2 - 1) / math.sqrt(inner)
    values = a_NRI, torch.zeros(count, outer, rank)
    a, b = (Stack(names=base.names, format=BF16, rule="other", value=side.to(base.value.device)) for side in values)
    return a, b
