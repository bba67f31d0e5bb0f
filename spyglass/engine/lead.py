"""What rank 0 of a divided model does, after it has told the others: steps, changes of rows, adapters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spyglass.batch.images import share_images
from spyglass.batch.types import Batch, ImageBatch
from spyglass.engine.cache.pages import Group, PageMemory
from spyglass.engine.ranks import Ranks
from spyglass.errors import CapacityError
from spyglass.lora.low_rank import AdapterFile
from spyglass.lora.pool import ModelBanks
from spyglass.runtime.frame import Pages
from spyglass.runtime.step_input import StepInput
from spyglass.runtime.steps import EngramRows, StepResult, StepRunner


class LeadMemory(PageMemory):
    """Memory that all ranks have; what changes it reaches the others before their next step."""

    def __init__(
        self,
        ranks: Ranks,
        groups: Sequence[Group],
        dtype: torch.dtype,
        device: torch.device,
        fill: float | None = None,
    ) -> None:
        super().__init__(groups, dtype, device, fill)
        self.number, self._pending = ranks.new_memory(), ranks.pending
        self._tell("open", tuple(groups), dtype, fill)
        weakref.finalize(self, self._pending.append, (self.number, "close", ())).atexit = False

    def _tell(self, operation: str, *arguments: Any) -> None:
        self._pending.append((self.number, operation, arguments))

    def resize(self, name: str, capacity: int) -> None:
        """See `PageMemory`, and so the others; what fails here is not sent."""
        super().resize(name, capacity)
        self._tell("resize", name, capacity)

    def copy(self, name: str, source: int, target: int, rows: int) -> None:
        super().copy(name, source, target, rows)
        self._tell("copy", name, source, target, rows)

    def clear(self, name: str, pages: Sequence[int]) -> None:
        super().clear(name, pages)
        self._tell("clear", name, pages)

    def keep(self, number: int, name: str, place_W: Any) -> None:
        super().keep(number, name, place_W)
        self._tell("keep", number, name, place_W)

    def restore(self, number: int, name: str, place_W: Any) -> None:
        super().restore(number, name, place_W)
        self._tell("restore", number, name, place_W)

    def forget(self, number: int) -> None:
        super().forget(number)
        self._tell("forget", number)


class LeadSteps(StepRunner):
    """Steps that all ranks run. What only rank 0 knows comes to them on the device, in the order of its use."""

    def __init__(self, ranks: Ranks, memory: LeadMemory, *arguments: Any, capture: tuple[int, ...] = ()) -> None:
        super().__init__(*arguments, capture=capture)
        self._ranks, self._seat = ranks, memory.number
        self._last: StepResult | None = None
        model, _, page_rows, _, banned_V = arguments
        self._vision = model.config.vision
        ranks.pending.append((self._seat, "run", (page_rows, banned_V.nonzero().flatten().tolist(), capture)))

    def run(
        self,
        step: StepInput,
        pages: Pages,
        *,
        image_rows_IC: torch.Tensor | None = None,
        engram_rows: EngramRows | None = None,
        amend: Callable[[Batch], None] | None = None,
        argmax: bool = False,
        between_layers: Callable[[], object] | None = None,
    ) -> StepResult:
        """See `StepRunner`. Raises RankError if it fails here or elsewhere."""
        assert between_layers is None, "the ranks of a model run one step at a time"
        ranks, group = self._ranks, self._ranks.group
        memories = None if engram_rows is None else {layer: rows.contiguous() for layer, rows in engram_rows().items()}

        def amended(batch: Batch) -> None:
            assert amend is not None
            amend(batch)
            group.broadcast(batch.ids_T)

        with ranks.turn():
            images = None if image_rows_IC is None else image_rows_IC.contiguous()
            engram = None if memories is None else {layer: like(rows) for layer, rows in memories.items()}
            ranks.send(
                "step", self._seat, step, None if images is None else like(images), engram, amend is not None, argmax
            )
            if images is not None:
                group.broadcast(images)
            self._last = super().run(
                step,
                pages,
                image_rows_IC=images,
                engram_rows=None
                if memories is None
                else lambda: {layer: group.broadcast(rows) for layer, rows in memories.items()},
                amend=None if amend is None else amended,
                argmax=argmax,
            )
        return self._last

    def logits(self, hidden_TC: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """See `StepRunner`; those of the last step."""
        assert self._last is not None and hidden_TC is self._last.hidden_TC
        with self._ranks.turn():
            same = rows_R is self._last.logit_rows_R
            self._ranks.send("logits", self._seat, None if same else len(rows_R))
            if not same:
                self._ranks.group.broadcast(rows_R)
            return super().logits(hidden_TC, rows_R)

    def encode_images(self, images: ImageBatch) -> torch.Tensor:
        """See `StepRunner`; several images are shared out by their patches, each goes through one rank's tower."""
        if len(images.grids_I2) < 2:
            return super().encode_images(images)
        ranks = self._ranks
        with ranks.turn():
            parts, rows = share_images(images, ranks.size, self._vision)
            sent = [None if part is None else part.to("cpu") for part in parts[1:]]
            ranks.send_each("encode", [(self._seat, part, rows) for part in sent])
            assert parts[0] is not None
            mine = super().encode_images(parts[0])
            return ranks.group.join(mine.T.contiguous(), rows).T.contiguous()


class LeadBanks(ModelBanks):
    """Adapters that all ranks have, each with its part."""

    def __init__(self, ranks: Ranks, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._ranks = ranks

    def fill(self, adapter_id: int, adapter: AdapterFile, factor: float) -> None:
        """See `ModelBanks`."""
        wrong: list[str | None] = []
        with self._ranks.turn():
            self._ranks.send("adapter", adapter_id, adapter.compact(), factor)
            try:
                super().fill(adapter_id, adapter, factor)
            except CapacityError as error:
                wrong.append(str(error))
            wrong += self._ranks.answers()
        for why in filter(None, wrong):
            self.clear(adapter_id)
            raise CapacityError(why)

    def clear(self, adapter_id: int) -> None:
        """See `ModelBanks`."""
        with self._ranks.turn():
            self._ranks.send("clear", adapter_id)
            super().clear(adapter_id)


def adapter_banks(model: torch.nn.Module, ranks: Ranks | None) -> ModelBanks:
    """Where adapters go: into the model, on all ranks that have a part of it."""
    return ModelBanks(model) if ranks is None else LeadBanks(ranks, model)


def like(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """What another process needs to make room for a tensor."""
    return tuple(tensor.shape), tensor.dtype
