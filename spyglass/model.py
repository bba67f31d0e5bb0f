"""The whole model, in four parts that any driver can call: pictures, embedding, text, logits.

Nothing here knows who drives it: an engine, a trainer and a plug-in all hand over `(batch, cache)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from spyglass.batch.types import Batch, CacheView, ImageBatch
from spyglass.config.model import ModelConfig, Rounding
from spyglass.errors import PromptError
from spyglass.layers.build import Build, weight_slots
from spyglass.layers.embedding import Embedding, PlainSpec, PlainTensor
from spyglass.layers.linear import Linear, LinearSpec
from spyglass.quant.packed import WeightSlot
from spyglass.text.step import TextBuild
from spyglass.text.v4 import V4Backbone
from spyglass.vision.aligner import Aligner
from spyglass.vision.tower import VisionTower

Numerics = Literal["reference", "plain"]

# kind number (spec v4 9.5) -> learned vector; kind 2 is a row of the picture itself
_LEARNED = {0: "image_start", 1: "image_pad", 3: "image_newline", 4: "image_end"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How a model is built. `pictures` False leaves tower, aligner and picture vectors out."""

    build: Build
    numerics: Numerics
    pictures: bool = True


class VisionLanguageModel(nn.Module):
    """Tower and aligner (None without pictures), embedding, backbone, head."""

    def __init__(self, config: ModelConfig, options: ModelOptions) -> None:
        super().__init__()
        text, build = config.text, options.build
        self.config = config
        self.options = options
        self.embedding = Embedding("embed", text.vocab_size, text.hidden_size, build)
        self.text = V4Backbone(_text_build(config, options))
        head = LinearSpec(name="head", in_features=text.hidden_size, out_features=text.vocab_size, fp32_out=True)
        self.head = Linear(head, build)
        self.vision: VisionTower | None = None
        self.aligner: Aligner | None = None
        self.learned = nn.ModuleDict()
        if config.vision is not None and options.pictures:
            self.vision = VisionTower(config.vision, build)
            self.aligner = Aligner(config.vision, text.hidden_size, build)
            for name in _LEARNED.values():
                spec = PlainSpec(name=name, shape=(text.hidden_size,), dtype=build.dtype)
                self.learned[name] = PlainTensor(spec, build)
        self._streams = text.hc_mult
        self._dtype = build.dtype

    def slots(self) -> list[WeightSlot]:
        """Every place that a checkpoint tensor fills."""
        return [slot for part in self.children() for slot in weight_slots(part)]

    def encode_images(self, images: ImageBatch) -> torch.Tensor:
        """Image rows [I, C] of the activation dtype, picture by picture, cells in reading order.

        Raises:
            PromptError: the model has no tower.
        """
        if self.vision is None or self.aligner is None:
            raise PromptError(self._no_pictures())
        rows_UY = self.vision(images)
        out: torch.Tensor = self.aligner(rows_UY, images.grids_I2, images.slot_I)
        return out

    def embed(self, batch: Batch, image_rows_IC: torch.Tensor | None = None) -> torch.Tensor:
        """Residual streams [T, M, C] of a step: M equal copies of token embeddings, picture rows in their places.

        `image_rows_IC` is what `batch.image_index_T` counts (spec v4 9.7, 3.1).

        Raises:
            PromptError: the step has picture rows and the model has no tower.
        """
        x_TC = self.embedding(batch.ids_T)
        if batch.has_pictures:
            x_TC = self._place_pictures(x_TC, batch, image_rows_IC)
        return x_TC[:, None].expand(-1, self._streams, -1).contiguous()

    def _place_pictures(self, x_TC: torch.Tensor, batch: Batch, image_rows_IC: torch.Tensor | None) -> torch.Tensor:
        if self.vision is None:
            raise PromptError(self._no_pictures())
        kinds_T = batch.kinds_T.long()
        table_KC = x_TC.new_zeros(len(_LEARNED) + 1, x_TC.shape[1])
        for kind, name in _LEARNED.items():
            holder = self.learned[name]
            assert isinstance(holder, PlainTensor)
            table_KC[kind] = holder.tensor()
        x_TC = torch.where((kinds_T >= 0)[:, None], table_KC[kinds_T.clamp(min=0)], x_TC)
        if batch.image_index_T is not None:
            assert image_rows_IC is not None, "the step has IMAGE rows, but no image rows were handed over"
            index_T = batch.image_index_T.long()
            rows_TC = image_rows_IC[index_T.clamp(min=0)].to(x_TC.dtype)
            x_TC = torch.where((index_T >= 0)[:, None], rows_TC, x_TC)
        return x_TC

    def logits(self, hidden_TC: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Logits fp32 [R, V] of the given rows (int64) of the backbone's hidden states."""
        out: torch.Tensor = self.head(hidden_TC.index_select(0, rows_R))
        return out

    def forward(self, batch: Batch, cache: CacheView, image_rows_IC: torch.Tensor | None = None) -> torch.Tensor:
        """Logits fp32 [R, V] of `batch.logit_rows_R`: the parts in order, for callers that need nothing in between."""
        hidden_TC, _ = self.text(self.embed(batch, image_rows_IC), batch, cache)
        return self.logits(hidden_TC, batch.logit_rows_R)

    def _no_pictures(self) -> str:
        if self.config.vision is None:
            return "this checkpoint has no vision tower and takes no pictures; send text only, or load a vision model"
        return "this model was loaded without its vision tower and takes no pictures; load it with images=True"


def _text_build(config: ModelConfig, options: ModelOptions) -> TextBuild:
    reference = options.numerics == "reference"
    if config.vision is None:
        bias: Literal["required", "optional", "none"] = "none"
    else:
        bias = "required" if options.pictures else "optional"
    return TextBuild(
        text=config.text,
        build=options.build,
        rounding=config.text.reference_rounding if reference else Rounding(),
        stepwise=reference,
        picture_bias=bias,
    )
