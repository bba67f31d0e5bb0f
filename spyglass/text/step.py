"""What the layers of a backbone share: how they are built, and what is computed once per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from spyglass.batch.types import Batch, CacheView
from spyglass.config.model import LayerPlan, RopeSpec, Rounding, TextConfig
from spyglass.layers.build import BuildContext
from spyglass.layers.rope import Rope

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """Everything a part of the backbone is built from.

    `rounding` is `Rounding()` for plain numerics. `stepwise`: the per-head q norm and the index scores round after
    every operation, as the released code does (spec v4 3.6). `images`: rows of images may come, so the routers need
    their own bias for them.
    """

    text: TextConfig
    build: BuildContext
    rounding: Rounding
    stepwise: bool
    images: bool


@dataclass(slots=True)
class SharedIndices:
    """Hand-off between layers within one step, by layer of the index source (spec v41 3.1).

    `topk_indices` int32 [T, X] entries, ascending, -1 = none; None = every visible entry. `blocks` int32 [T, Y]
    candidates, the same way; None = every block.
    """

    topk_indices: dict[int, torch.Tensor | None] = field(default_factory=dict)
    blocks: dict[int, torch.Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step as all layers see it: the batch, rotary tables by spec, and what follows from ids and kinds.

    `entry_tables` rotate the entries that close in this step, by (ratio, spec). `is_image_T` bool, None without images.
    `ids_T` int64, safe to look up everywhere. `choices` is what index sources chose for these rows, written by them and
    read by the layers above.
    """

    batch: Batch
    tables: Mapping[RopeSpec, Tables]
    entry_tables: Mapping[tuple[int, RopeSpec], Tables]
    is_image_T: torch.Tensor | None
    ids_T: torch.Tensor
    choices: SharedIndices = field(default_factory=SharedIndices)


def make_step(batch: Batch, cache: CacheView, ropes: Mapping[RopeSpec, Rope], layers: Sequence[LayerPlan]) -> Step:
    """Work that would otherwise be repeated in every layer."""
    entries = {(plan.compressor.ratio, plan.rope) for plan in layers if plan.compressor is not None}
    return Step(
        batch=batch,
        tables={spec: rope.tables(batch.positions_T) for spec, rope in ropes.items()},
        entry_tables={
            (ratio, spec): ropes[spec].tables(cache.compression[ratio].positions_P)
            for ratio, spec in entries
            if len(cache.compression[ratio].positions_P)
        },
        is_image_T=batch.kinds_T >= 0 if batch.has_images else None,
        ids_T=batch.ids_T.clamp(min=0).long(),
    )


def make_ropes(layers: Sequence[LayerPlan], device: torch.device) -> dict[RopeSpec, Rope]:
    """One rotary table per distinct spec."""
    return {spec: Rope(spec.theta, spec.dim, spec.yarn, device) for spec in {plan.rope for plan in layers}}
