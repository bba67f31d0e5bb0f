"""The whole model, in four parts that any driver can call: images, embedding, text, logits.

Nothing here knows who drives it: an engine, a trainer and a plug-in all hand over `(batch, cache)`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from spyglass.batch.types import Batch, CacheView, ImageBatch
from spyglass.checkpoint.dummy import dummy_folder, load_dummy
from spyglass.checkpoint.load import LoadReport, load_into
from spyglass.checkpoint.safetensors import open_checkpoint
from spyglass.config.cache import stores_rows
from spyglass.config.model import ModelConfig, Rounding
from spyglass.config.read import read_model_config
from spyglass.config.shipped import find_model
from spyglass.errors import DeviceError, PromptError
from spyglass.layers.build import BuildContext, held_tensors, weight_slots
from spyglass.layers.embedding import Embedding, PlainTensor
from spyglass.layers.hosted import HostSide
from spyglass.layers.linear import Linear
from spyglass.layers.merged import stack_weights
from spyglass.ops.declare import Backend
from spyglass.ops.table import Which, bind_ops
from spyglass.parallel.group import ALONE, Group
from spyglass.params.shard import WHOLE, Shard, require_even
from spyglass.params.table import most_tensors, param_table
from spyglass.placement import PLACES
from spyglass.quant.packed import WeightSlot
from spyglass.text.step import LayerContext
from spyglass.text.v4 import V4Backbone
from spyglass.text.v41 import V41Backbone
from spyglass.vision.aligner import Aligner
from spyglass.vision.graphs import VisionGraphs, why_not
from spyglass.vision.tower import VisionTower

Numerics = Literal["reference", "plain"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# kind number (spec v4 9.5) -> learned vector; kind 2 is a row of the image itself
_LEARNED = {0: "image_start", 1: "image_pad", 3: "image_newline", 4: "image_end"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How a model is built. `images` False leaves tower, aligner and image vectors out.

    `vision_graphs`: images go through CUDA graphs where they fit one (see `spyglass.vision.graphs`).
    """

    build: BuildContext
    numerics: Numerics
    images: bool = True
    vision_graphs: bool = False


class VisionLanguageModel(nn.Module):
    """Tower and aligner (None without images), embedding, backbone of the family, head."""

    def __init__(self, config: ModelConfig, options: ModelOptions) -> None:
        super().__init__()
        self.params = param_table(config)
        text, build = config.text, replace(options.build, params=self.params)
        options = replace(options, build=build)
        self.config = config
        self.options = options
        self.embedding = Embedding(build, "embed")
        backbone = V41Backbone if text.shifted_hyper else V4Backbone
        self.text: V4Backbone | V41Backbone = backbone(_text_build(config, options))
        self.head = Linear(build, "head", fp32_out=True)
        self.vision: VisionTower | None = None
        self.aligner: Aligner | None = None
        self.vision_graphs: VisionGraphs | None = None
        self.learned = nn.ModuleDict()
        if config.vision is not None and options.images:
            self.vision = VisionTower(config.vision, build)
            self.aligner = Aligner(config.vision, build)
            if options.vision_graphs:
                self.vision_graphs = VisionGraphs(self.vision, self.aligner, build)
            for name in _LEARNED.values():
                if name in build.params:
                    self.learned[name] = PlainTensor(build, name, build.dtype)
        self._streams = text.hc_mult
        self._dtype = build.dtype
        self._group, self._head_rows = build.group, build.rows("head")
        ranks = [replace(build, shard=Shard(rank, build.shard.size)) for rank in range(build.shard.size)]
        self._head_widths = [len(rank.rows("head")) for rank in ranks]

    def slots(self) -> list[WeightSlot]:
        """Every place that a checkpoint tensor fills."""
        return [slot for part in self.children() for slot in weight_slots(part)]

    @property
    def vision_state(self) -> Literal["yes", "no", "off"]:
        """Whether images are taken; "off" where the checkpoint has a tower that was not loaded."""
        if self.config.vision is None:
            return "no"
        return "off" if self.vision is None else "yes"

    @property
    def capture_backend(self) -> Backend:
        """What captures the steps of this model; "eager" where it holds what cannot be."""
        host = self.options.build.host
        can = self._group.capturable and (host is None or host.capturable)
        return self.options.build.ops.capture_backend if can else "eager"

    @property
    def weights_version(self) -> int:
        """Another number whenever weights or adapters are others."""
        return self.options.build.version.number

    def held_tensors(self) -> Iterator[torch.Tensor]:
        """Every weight, adapters included."""
        return held_tensors(self)

    def encode_images(self, images: ImageBatch) -> torch.Tensor:
        """Image rows [I, C] of the activation dtype, image by image, cells in reading order.

        Raises:
            PromptError: the model has no tower.
        """
        if self.vision is None or self.aligner is None:
            raise PromptError(self._no_images())
        if self.vision_graphs is not None:
            return self.vision_graphs(images)
        rows_UY = self.vision(images)
        out: torch.Tensor = self.aligner(rows_UY, images.grids_I2, images.adapter_I)
        return out

    def embed(self, batch: Batch, image_rows_IC: torch.Tensor | None = None) -> torch.Tensor:
        """Residual streams [T, M, C] of a step: M equal copies of token embeddings, image rows in their places.

        `image_rows_IC` is what `batch.image_index_T` counts (spec v4 9.7, 3.1).

        Raises:
            PromptError: the step has image rows and the model has no tower.
        """
        x_TC = self.embedding(batch.ids_T)
        if batch.has_images:
            x_TC = self._place_images(x_TC, batch, image_rows_IC)
        return x_TC[:, None].expand(-1, self._streams, -1).contiguous()

    def _place_images(self, x_TC: torch.Tensor, batch: Batch, image_rows_IC: torch.Tensor | None) -> torch.Tensor:
        if self.vision is None:
            raise PromptError(self._no_images())
        kinds_T = batch.kinds_T.long()
        # fp32 and index_select: the gradient of a row that thousands share is summed in fp32, without a sort
        summed = torch.promote_types(x_TC.dtype, torch.float32)
        table_KC = x_TC.new_zeros(len(_LEARNED) + 1, x_TC.shape[1], dtype=summed)
        for kind, name in _LEARNED.items():
            if name in self.learned:
                holder = self.learned[name]
                assert isinstance(holder, PlainTensor)
                table_KC[kind] = holder.tensor()
        learned_TC = table_KC.index_select(0, kinds_T.clamp(min=0)).to(x_TC.dtype)
        x_TC = torch.where((kinds_T >= 0)[:, None], learned_TC, x_TC)
        if batch.image_index_T is not None:
            assert image_rows_IC is not None, "the step has IMAGE rows, but no image rows were handed over"
            index_T = batch.image_index_T.long()
            rows_TC = image_rows_IC.index_select(0, index_T.clamp(min=0)).to(x_TC.dtype)
            x_TC = torch.where((index_T >= 0)[:, None], rows_TC, x_TC)
        return x_TC

    def logits(self, hidden_TC: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Logits fp32 [R, V] of the given rows (int64) of the backbone's hidden states."""
        return self._group.join(self.head(hidden_TC.index_select(0, rows_R)), self._head_widths)

    def argmax(
        self, hidden_TC: torch.Tensor, rows_R: torch.Tensor, banned_V: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Id int64 [R] and value fp32 [R] of the largest of `logits` that is not banned (bool).

        Its sums are those of `logits`, bit for bit. None where no kernel saves the writing of all of them.
        """
        if not self.options.build.ops.can("linear_argmax", "saves_logits"):
            return None
        held = self._head_rows
        if len(held) < len(banned_V):
            banned_V = banned_V[held.start : held.stop]
        ids_R, values_R = self.head.argmax(hidden_TC.index_select(0, rows_R), banned_V)
        return self._group.largest(ids_R + held.start if held.start else ids_R, values_R)

    def forward(self, batch: Batch, cache: CacheView, image_rows_IC: torch.Tensor | None = None) -> torch.Tensor:
        """Logits fp32 [R, V] of `batch.logit_rows_R`: the parts in order, for callers that need nothing in between."""
        hidden_TC, _ = self.text(self.embed(batch, image_rows_IC), batch, cache)
        return self.logits(hidden_TC, batch.logit_rows_R)

    def _no_images(self) -> str:
        if self.config.vision is None:
            return "this checkpoint has no vision tower and takes no images; send text only, or load a vision model"
        return "this model was loaded without its vision tower and takes no images; load it with images=True"


def _text_build(config: ModelConfig, options: ModelOptions) -> LayerContext:
    reference = options.numerics == "reference"
    return LayerContext(
        text=config.text,
        build=options.build,
        rounding=config.text.reference_rounding if reference else Rounding(),
        stepwise=reference,
        images=config.vision is not None and options.images,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run. `numerics` and `dtype` are what "auto" became; `report` says which tensors were read."""

    model: VisionLanguageModel
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    numerics: Numerics
    report: LoadReport

    @property
    def stores_rows(self) -> bool:
        """Whether the memory of an engine holds rows as the codes they are rounded to."""
        differentiable = self.model.options.build.ops.chosen["row_finish"] == "training"
        return stores_rows(self.numerics, self.device.type) and not differentiable


def load_model(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    numerics: Literal["auto", "reference", "plain"] = "auto",
    images: bool = True,
    ops: Which = "auto",
    vision_graphs: Literal["auto", "on", "off"] = "auto",
    expand: bool = False,
    load: Literal["files", "dummy"] = "files",
    without: Collection[str] = (),
    progress: bool = True,
    shard: Shard = WHOLE,
    group: Group = ALONE,
    host_experts: Collection[int] = (),
) -> LoadedModel:
    """Read a checkpoint folder into a model, or into the part of it that `shard` is; `group` has the other parts.

    `dtype` of activations: "auto" is bfloat16, as released. `numerics`: "auto" is "reference" when any matrix is stored
    as FP8 or FP4, "plain" otherwise. `images` False leaves the tower unbuilt and its weights unread. `ops`: "auto"
    takes the fastest implementation that runs here, "reference" the defining one, "training" what has a gradient.
    `vision_graphs`: images through CUDA graphs, "auto" wherever they can be had (bfloat16 on a GPU). `expand` decodes
    packed weights while loading (more memory, sometimes faster). `load`: "dummy" draws the weights instead of reading
    them, in the formats config.json promises. `without`: ops that are to run by their reference. `progress` shows a bar
    on a terminal. `host_experts`: layers whose routed experts stay in host memory (`layers.hosted`).

    Raises:
        ConfigError: config.json is missing, malformed or of an unknown family, or the model cannot be divided so.
        CheckpointError: the files do not hold what the configuration promises, or are damaged.
        DeviceError: an unknown or absent device, dtype or op choice, or graphs where there can be none.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise DeviceError(f"dtype={dtype!r} is not known; use 'auto', 'float32' or 'bfloat16'")
    if numerics not in ("auto", "reference", "plain"):
        raise DeviceError(f"numerics={numerics!r} is not known; use 'auto', 'reference' or 'plain'")
    if vision_graphs not in ("auto", "on", "off"):
        raise DeviceError(f"vision_graphs={vision_graphs!r} is not known; use 'auto', 'on' or 'off'")
    place = find_device(device)
    config = read_model_config(path)
    require_even(param_table(config), shard.size)
    checkpoint = open_checkpoint(os.fspath(path), most_tensors(config)) if load == "files" else None
    dtype_name = "bfloat16" if dtype == "auto" else dtype
    packed = config.weights is not None if checkpoint is None else checkpoint.has_packed_weights
    chosen: Numerics = numerics if numerics != "auto" else "reference" if packed else "plain"
    build = BuildContext(
        ops=bind_ops(place.type, dtype_name, ops, without),
        device=place,
        dtype=DTYPES[dtype_name],
        expand=expand,
        shard=shard,
        group=group,
    )
    if host_experts:
        by_reference = build.ops.chosen["experts_grouped"] == "reference"
        build = replace(build, host=HostSide(host_experts, place, places=PLACES, reference=by_reference))
    graphs = vision_graphs == "on" or (vision_graphs == "auto" and why_not(build) is None)
    options = ModelOptions(build=build, numerics=chosen, images=images, vision_graphs=graphs)
    model = VisionLanguageModel(config, options)
    model.eval()
    if checkpoint is None:
        held = {name: shard.held(param) for name, param in model.params.items()}
        report = load_dummy(model.slots(), held, place, progress=progress)
    else:
        skip: tuple[Literal["draft", "vision"], ...] = ("draft",) if images else ("draft", "vision")
        report = load_into(model.slots(), checkpoint, skip=skip, progress=progress, shard=shard, params=model.params)
    if model.options.build.ops.merges:
        stack_weights(model)
    if build.host is not None:
        build.host.ready()
    return LoadedModel(model=model, config=config, device=place, dtype=build.dtype, numerics=chosen, report=report)


def model_folder(name_or_path: str | os.PathLike[str], load: Literal["files", "dummy"]) -> Path:
    """The checkpoint folder of a path or of a shipped model's name; for weights that are drawn, of a preset's name too.

    Raises:
        ConfigError: as `find_model`.
    """
    return find_model(name_or_path) if load == "files" else dummy_folder(name_or_path)


def find_device(device: str | torch.device) -> torch.device:
    """The device, if this machine has it.

    Raises:
        DeviceError: the name is no device, or torch does not see it.
    """
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"device={device!r} is not a device; use 'cpu' or 'cuda'") from error
    if place.type == "cuda":
        count = torch.cuda.device_count()
        if (place.index or 0) >= count:
            raise DeviceError(f"device={device!r} was asked for, but torch sees {count} CUDA devices; use 'cpu'")
    elif place.type != "cpu":
        raise DeviceError(f"device={device!r} is not supported; use 'cpu' or 'cuda'")
    return place
