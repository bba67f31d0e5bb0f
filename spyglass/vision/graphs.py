"""Images through CUDA graphs: one graph per budget of patches, captured when it is first needed.

An image of 784 patches keeps a large GPU busy for less time than a host needs to launch its kernels one by one; a
graph launches them all at once. A graph has fixed shapes, so a batch is laid out in the smallest budget that holds it:
images first, as in the packed tower, then unused rows that belong to no image. Nothing reads those, whatever they
hold: attention never leaves an image, every other op works row by row, and the aligner gathers by index.

Spec v41 9.1 counts budgets in span tokens, in powers of two. Here the unit is the patch, which is what the time goes
with, and a doubling has four steps, so that at most a fifth of a large graph's rows is unused.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.batch.images import Grid, num_cells, offsets
from spyglass.batch.types import ImageBatch
from spyglass.config.model import VisionConfig
from spyglass.errors import DeviceError
from spyglass.layers.build import BuildContext
from spyglass.layers.linear import Linear
from spyglass.layers.norm import RMSNorm
from spyglass.runtime.capture import Capture
from spyglass.vision.aligner import Aligner, cell_index, gather_cells
from spyglass.vision.tower import PackedRows, VisionTower, angle_tables, patch_positions

SMALLEST = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The most that a graph holds: patches of all images, cells of all images, images."""

    patches: int
    cells: int
    images: int


def budgets(vision: VisionConfig, *, largest: int | None = None) -> tuple[Budget, ...]:
    """Budgets of a tower, ascending: 256, 320, 384, 448, 512, 640, ... and `largest`.

    `largest` (patches) is by default what one image may have: beyond it a GPU is busy enough without graphs. A
    budget holds twice as many images as have the usual least size, at most 64. Cells are at most a sixth of the
    patches, which only images one patch high or wide exceed.
    """
    if largest is None:
        largest = vision.max_tokens * vision.downsample_ratio**2
    sizes = {largest}
    base = SMALLEST
    while base < largest:
        sizes.update(size for size in (base, base * 5 // 4, base * 3 // 2, base * 7 // 4) if size < largest)
        base *= 2
    least = max(1, vision.min_pixels // vision.patch_size**2)
    return tuple(
        Budget(patches=size, cells=max(1, size // 6), images=min(64, max(1, 2 * size // least)))
        for size in sorted(sizes)
    )


def fitting(ladder: Sequence[Budget], grids: Sequence[Grid], ratio: int) -> Budget | None:
    """The smallest budget that holds the images, None if there is none."""
    patches, cells = offsets(grids)[-1], sum(num_cells(grid, ratio) for grid in grids)
    for budget in ladder:
        if patches <= budget.patches and cells <= budget.cells and len(grids) <= budget.images:
            return budget
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where images lie in a budget; host or device, int32.

    `row_U`, `column_U`: place of each patch in its image (0 for unused rows). `cu_seqlens_I1` [images + 1]: their
    borders; images that are not there are empty and lie behind the last. `cells_I`: [cells, ratio²] patches of each
    cell, -1 = none.
    """

    row_U: torch.Tensor
    column_U: torch.Tensor
    cu_seqlens_I1: torch.Tensor
    cells_I: torch.Tensor


def layout_values(grids: Sequence[Grid], budget: Budget, ratio: int) -> NDArray[np.int32]:
    """The numbers of a `Layout` in one array, so that one copy takes them to the device."""
    row_U, column_U = patch_positions(grids)
    borders = offsets(grids)
    cells = cell_index(grids, ratio)
    values = np.zeros(_layout_sizes(budget, ratio)[-1], np.int32)
    row, column, cu_seqlens, index = np.split(values, _layout_sizes(budget, ratio)[:-1])
    row[: len(row_U)] = row_U.numpy()
    column[: len(column_U)] = column_U.numpy()
    cu_seqlens[: len(borders)] = borders
    cu_seqlens[len(borders) :] = borders[-1]
    index[: cells.size] = cells.reshape(-1)
    index[cells.size :] = -1
    return values


def layout_of(values: torch.Tensor, budget: Budget, ratio: int) -> Layout:
    """Views of `layout_values`."""
    sizes = np.diff(_layout_sizes(budget, ratio), prepend=0).tolist()
    row_U, column_U, cu_seqlens_I1, cells = values.split(sizes)
    return Layout(row_U=row_U, column_U=column_U, cu_seqlens_I1=cu_seqlens_I1, cells_I=cells.view(-1, ratio**2))


def _layout_sizes(budget: Budget, ratio: int) -> list[int]:
    """Where each part of the array ends."""
    parts = (budget.patches, budget.patches, budget.images + 1, budget.cells * ratio**2)
    return np.cumsum(parts).tolist()


def why_not(build: BuildContext) -> str | None:
    """Why a model built like this cannot use graphs; None if it can."""
    if build.device.type != "cuda":
        return f"graphs need a CUDA device, this is {build.device.type}"
    if not build.ops.can("vit_attention", "capturable"):
        return f"graphs need flash attention (bfloat16, ops='auto'), not {build.ops.chosen['vit_attention']}"
    return None


def leaves(tower: VisionTower, aligner: Aligner) -> list[Linear | RMSNorm]:
    """The modules that hold weights."""
    return [leaf for part in (tower, aligner) for leaf in part.modules() if isinstance(leaf, Linear | RMSNorm)]


class PaddedVision:
    """Tower and aligner over a layout of fixed size: what a graph captures, and runs without one as well."""

    def __init__(self, tower: VisionTower, aligner: Aligner, longest: int, device: torch.device) -> None:
        vision = tower.vision
        self.tower, self.aligner, self.longest = tower, aligner, longest
        cos_PR, sin_PR = angle_tables(longest, vision.rope_theta, vision.hidden_size // vision.num_attention_heads)
        self._cos_PR, self._sin_PR = cos_PR.to(device), sin_PR.to(device)

    def __call__(self, patches_UF: torch.Tensor, layout: Layout, borders: tuple[int, ...]) -> torch.Tensor:
        """Image rows [cells, C]. `borders` on the host, for attention: no image is longer than their widest gap."""
        row_U, column_U = layout.row_U, layout.column_U
        rows = PackedRows(
            cos_UR=torch.cat([self._cos_PR.index_select(0, row_U), self._cos_PR.index_select(0, column_U)], dim=1),
            sin_UR=torch.cat([self._sin_PR.index_select(0, row_U), self._sin_PR.index_select(0, column_U)], dim=1),
            cu_seqlens_I1=layout.cu_seqlens_I1,
            offsets=borders,
            adapter_U=None,
        )
        return self.aligner.project(gather_cells(self.tower.encode(patches_UF, rows), layout.cells_I.long()))


class VisionGraphs:
    """Encodes images, through a graph where one fits and eagerly where none does.

    `ladder`: the budgets, ascending. `hits` counts calls that replayed a graph, `eager` the others by reason.
    """

    def __init__(
        self, tower: VisionTower, aligner: Aligner, build: BuildContext, ladder: Sequence[Budget] | None = None
    ) -> None:
        """Raises DeviceError if the model cannot use graphs (`why_not`)."""
        reason = why_not(build)
        if reason is not None:
            raise DeviceError(f"vision_graphs='on' was asked for, but {reason}; use 'auto' or 'off'")
        self.hits = 0
        self.eager: Counter[str] = Counter()
        self._tower, self._aligner, self._device = tower, aligner, build.device
        self.ladder = tuple(budgets(tower.vision) if ladder is None else ladder)
        self._leaves = leaves(tower, aligner)
        self.capture = Capture("cuda_graph", build.device, max_graphs=len(self.ladder))
        self._weights: list[object] = []
        self._inputs: dict[Budget, torch.Tensor] = {}  # the numbers of a layout
        longest = self.ladder[-1].patches
        with torch.inference_mode(False), torch.cuda.device(self._device):
            self._padded = PaddedVision(tower, aligner, longest, self._device)
            width = tower.patch_embed.in_features
            self.patches_UF = torch.zeros(longest, width, dtype=build.dtype, device=self._device)

    def __call__(self, images: ImageBatch) -> torch.Tensor:
        """Image rows [I, C] as tower and aligner give them; a tensor of its own."""
        budget, reason = self._choose(images)
        if budget is None:
            self._note(reason)
            rows_UY = self._tower(images)
            out: torch.Tensor = self._aligner(rows_UY, images.grids_I2, images.adapter_I)
            return out
        self.hits += 1
        return self._replay(budget, images)

    def prepare(self) -> None:
        """Capture every budget now, the largest first, instead of when each is first needed."""
        self._weights_suit()
        with torch.inference_mode(False), torch.no_grad():
            for budget in reversed(self.ladder):
                self._run(budget, layout_values([], budget, self._aligner.ratio))

    def _choose(self, images: ImageBatch) -> tuple[Budget | None, str]:
        if torch.is_grad_enabled():
            return None, "gradients are recorded"
        if not images.grids_I2:
            return None, "no images"
        budget = fitting(self.ladder, images.grids_I2, self._aligner.ratio)
        if budget is None:
            return None, "larger than the largest graph"
        return (budget, "") if self._weights_suit() else (None, "adapters or packed weights in the tower")

    def _weights_suit(self) -> bool:
        """Plain bf16 weights without adapters; graphs captured with other weights are forgotten."""
        holds: list[object] = []
        for leaf in self._leaves:
            if isinstance(leaf, RMSNorm):
                holds.append(leaf.weight_D)
                continue
            if leaf.adapter is not None or leaf.weight is None or leaf.weight.data.dtype != torch.bfloat16:
                return False
            holds += (leaf.weight, leaf.bias_O)
        self._weights = holds  # kept, so that no other object gets the identity of one of them
        self.capture.use(tuple(id(held) for held in holds))
        return True

    def _note(self, reason: str) -> None:
        if reason not in self.eager:
            logging.getLogger(__name__).info("images run without a CUDA graph: %s", reason)
        self.eager[reason] += 1

    def _replay(self, budget: Budget, images: ImageBatch) -> torch.Tensor:
        ratio = self._aligner.ratio
        cells = sum(num_cells(grid, ratio) for grid in images.grids_I2)
        with torch.inference_mode(False), torch.no_grad():
            self.patches_UF[: len(images.patches_U)].copy_(self._tower.patch_values(images.patches_U))
            return self._run(budget, layout_values(images.grids_I2, budget, ratio))[:cells].clone()

    def _run(self, budget: Budget, values: NDArray[np.int32]) -> torch.Tensor:
        """Image rows [cells, C] of the patches that lie ready, overwritten by the next run."""
        given = torch.from_numpy(values)
        if budget not in self._inputs:
            self._inputs[budget] = given.to(self._device)
        self._inputs[budget].copy_(given)
        layout = layout_of(self._inputs[budget], budget, self._aligner.ratio)
        patches_UF = self.patches_UF[: budget.patches]
        (out_IC,) = self.capture.run(budget, lambda: (self._padded(patches_UF, layout, (0, budget.patches)),))
        return out_IC
