"""Training every weight of a small model: one step of fixed shape, captured once on a GPU and then replayed.

Forward, backward, update and balancing are one graph of launches, so the host only copies the next step's arrays in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch

from scripts.tiny.bins import Capacity, cells_of, device_step, image_rows_of, masks_of
from scripts.tiny.cell_loss import place_loss, place_names
from scripts.tiny.dense_ops import StepState, training_ops
from scripts.tiny.muon import Muon, MuonSettings
from spyglass.config.model import ModelConfig
from spyglass.errors import CheckpointError, ConfigError
from spyglass.layers.build import BuildContext
from spyglass.model import ModelOptions, Numerics, VisionLanguageModel
from spyglass.params.table import Param, param_table
from spyglass.runtime.capture import CudaGraph, CudaGraphs
from spyglass.train.balance import BIASES, balance
from spyglass.train.loss import IGNORED, token_loss
from spyglass.train.masters import Masters, stored_values
from spyglass.vision.tower import angle_tables

_WARM_UP = 3

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one step, on the device: summed loss, number of targets, of right ones, loss of places (`cell_loss`, mean of
    the cells), gradient norm, `imbalance`."""

    loss: torch.Tensor
    count: torch.Tensor
    right: torch.Tensor
    places: torch.Tensor
    norm: torch.Tensor
    imbalance: torch.Tensor


class WholeTrainer:
    """A model, its masters and their optimiser.

    With `keep_tower` tower and aligner stay as they are: their masters get no gradient.

    Indexers stay as `initial` made them: no gradient reaches them, and below `index_topk` entries they choose nothing.

    Raises:
        ConfigError: the capacity's bins are so long that indexers would choose.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: Capacity,
        initial: Callable[[str, Param], torch.Tensor],
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        numerics: Numerics = "reference",
        settings: MuonSettings | None = None,
        compiled: bool = False,
        masters: Callable[..., Masters] = Masters,
        keep_tower: bool = False,
    ) -> None:
        _refuse_choosing(config, capacity)
        place = torch.device(device)
        self.config, self.capacity, self.state = config, capacity, StepState()
        ops = training_ops(place.type, str(dtype).removeprefix("torch."), self.state, compiled=compiled)
        build = BuildContext(ops=ops, device=place, dtype=dtype)
        self.model = VisionLanguageModel(config, ModelOptions(build=build, numerics=numerics))
        self.masters = masters(self.model, param_table(config), initial, fixed=BIASES)
        self.optimiser = Muon(self.masters.stacks, MuonSettings() if settings is None else settings)
        self.balance_rate = torch.zeros((), device=place)
        self.place_rate = torch.zeros((), device=place)
        self._place_names = place_names(config.text.hidden_size, place)
        self._tables = {
            int(name.split(".")[1]): stored_values(value, self.masters.specs[name].format).to(dtype)
            for name, value in self.masters.fixed.items()
            if name.endswith(".engram.embed")
        }
        vision = config.vision
        assert vision is not None, "whole training is for models with a tower"
        longest = capacity.largest_image
        angles = angle_tables(longest, vision.rope_theta, vision.hidden_size // vision.num_attention_heads)
        self._angles = angles[0].to(place), angles[1].to(place)
        self._dtype, self._keep_tower = dtype, keep_tower
        self._graph: CudaGraph | None = None
        self._inputs: dict[str, torch.Tensor] = {}

    def logits(self, tensors: Tensors) -> torch.Tensor:
        """Logits fp32 [R, V] of a step laid out by `lay_out`, from the masters' rounded weights."""
        return self._forward(tensors)[0]

    def _forward(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [R, V] and image rows [I, C]."""
        self.masters.deliver()
        self.state.begin(masks_of(tensors, self.config.text, self.capacity), tensors["real_T"])
        batch, cache = device_step(tensors, self.config.text, self.capacity, self._dtype)
        batch = replace(batch, engram_rows=self._engram_rows(tensors))
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._keep_tower):
            image_rows_IC = self._image_rows(tensors)
        hidden, _ = self.model.text(self.model.embed(batch, image_rows_IC), batch, cache)
        return self.model.logits(hidden, batch.logit_rows_R), image_rows_IC

    def _image_rows(self, tensors: Tensors) -> torch.Tensor:
        vision, aligner = self.model.vision, self.model.aligner
        assert vision is not None and aligner is not None
        borders = tensors["borders_I1"]
        on_host = borders.device.type == "cpu"
        offsets = tuple(borders.tolist()) if on_host else (0, self.capacity.largest_image)
        rows = image_rows_of(tensors, self._angles, offsets)
        rows_UY = vision.encode(vision.patch_values(tensors["patches_U"]), rows)
        return aligner.project(cells_of(rows_UY, tensors["cells_I"]))

    def _engram_rows(self, tensors: Tensors) -> dict[int, torch.Tensor]:
        """Rows of the memory tables, which are drawn once and not trained, as their file holds them."""
        return {
            layer: table_RD.index_select(0, tensors[f"engram_TJ{layer}"].flatten()).view(self.capacity.rows, -1)
            for layer, table_RD in self._tables.items()
        }

    def step(self, tensors: Tensors) -> Outcome:
        """Forward, backward, update, balance, at `optimiser.rate` and `balance_rate`; nothing is read back.

        What falls is the mean loss of the targets plus `place_rate` times that of places.
        """
        logits, image_rows_IC = self._forward(tensors)
        targets = tensors["targets_R"].long()
        loss, count = token_loss(logits, targets)
        places = place_loss(image_rows_IC, self._place_names, tensors["places_I2"])
        (loss + self.place_rate * count * places).backward()
        norm = self.optimiser.step([leaf.grad for leaf in self.masters.leaves], count)
        loads = self.state.loads
        balance(self.masters.fixed, loads, self.config.text, self.balance_rate)
        right = ((logits.detach().argmax(dim=1) == targets) & (targets != IGNORED)).sum()
        return Outcome(
            loss=loss.detach(),
            count=count,
            right=right,
            places=places.detach(),
            norm=norm,
            imbalance=imbalance(loads),
        )

    def capture(self, tensors: Tensors) -> None:
        """Make `replay` possible: record a step on copies of these tensors. Weights and state stay as they are."""
        self._inputs = {name: tensor.clone() for name, tensor in tensors.items()}
        kept = {name: tensor.detach().clone() for name, tensor in self.state_tensors().items()}
        place = next(iter(self._inputs.values())).device

        def run() -> tuple[torch.Tensor, ...]:
            outcome = self.step(self._inputs)
            return tuple(getattr(outcome, field.name) for field in fields(outcome))

        self._graph = CudaGraphs(place, warm_up=_WARM_UP).capture(run)
        self.restore(kept)

    def replay(self, tensors: Tensors) -> Outcome:
        """The captured step on these tensors; the outcome is overwritten by the next call."""
        assert self._graph is not None
        for name, tensor in self._inputs.items():
            tensor.copy_(tensors[name], non_blocking=True)
        return Outcome(**dict(zip((field.name for field in fields(Outcome)), self._graph.replay(), strict=True)))

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Everything that training changes, by name."""
        values = {f"value.{index}": stack.value for index, stack in enumerate(self.masters.stacks)}
        biases = {f"fixed.{name}": value for name, value in self.masters.fixed.items() if name.endswith(BIASES)}
        return values | biases | {f"optimiser.{name}": value for name, value in self.optimiser.state.items()}

    @torch.no_grad()
    def restore(self, tensors: Tensors) -> None:
        """Put `state_tensors` back.

        Raises:
            CheckpointError: they are those of another model.
        """
        mine = self.state_tensors()
        if {n: t.shape for n, t in mine.items()} != {n: t.shape for n, t in tensors.items()}:
            raise CheckpointError("the saved training state is that of another model; start anew in another folder")
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])


def unchosen(config: ModelConfig, capacity: Capacity) -> ModelConfig:
    """The model whose indexers choose nothing in a bin, which is how it learns: no gradient reaches them.

    The shipped V4.1 has an `index_topk` of 2,048 for the same reason: of longer contexts its indexers, which were never
    trained, choose as they were drawn.
    """
    return replace(config, text=replace(config.text, index_topk=max(config.text.index_topk, capacity.length)))


def imbalance(loads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Largest share of one expert over the even share, of all layers and both kinds of rows; 1 = even."""
    stacked = torch.stack(list(loads))
    return (stacked.amax(dim=-1) / stacked.mean(dim=-1).clamp(min=1e-9)).amax()


def _refuse_choosing(config: ModelConfig, capacity: Capacity) -> None:
    ratios = [plan.ratio for plan in config.text.layers if plan.index_from is not None]
    if ratios and capacity.length // min(ratios) > config.text.index_topk:
        raise ConfigError(
            f"bins of {capacity.length} rows have more entries than index_topk {config.text.index_topk}, so indexers "
            "would choose; no gradient reaches them: use shorter bins"
        )
