"""From rows of patches to rows of the text model: each ratio x ratio cell of patches becomes one.

The grid is padded with zeros right and below to whole cells, after the tower's last norm; a cell is flattened channel
by channel, feature c · r² + dy · r + dx; then two linear maps with an exact (erf) GELU between them (spec v4 9.4,
v41 7.5).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from spyglass.batch.images import Grid, num_cells, offsets
from spyglass.config.model import VisionConfig
from spyglass.layers.build import BuildContext
from spyglass.layers.linear import Linear


def cell_index(grids: Sequence[Grid], ratio: int) -> NDArray[np.int64]:
    """Packed patch row of each place of each cell, [cells, ratio²]: images in order, cells row by row, places too.

    -1 where a cell reaches past the image.
    """
    parts = [np.empty((0, ratio * ratio), np.int64)]
    for first, (height, width) in zip(offsets(grids)[:-1], grids, strict=True):
        y = np.arange(-(-height // ratio) * ratio).reshape(-1, 1, ratio, 1)
        x = np.arange(-(-width // ratio) * ratio).reshape(1, -1, 1, ratio)
        index = np.where((y < height) & (x < width), first + y * width + x, -1)
        parts.append(index.reshape(-1, ratio * ratio))
    return np.concatenate(parts)


def unfold_cells(rows_UY: torch.Tensor, grids: Sequence[Grid], ratio: int) -> torch.Tensor:
    """[cells, Y · ratio²], channel-major, zeros where a cell reaches past its image; one gather for all images."""
    return gather_cells(rows_UY, torch.from_numpy(cell_index(grids, ratio)).to(rows_UY.device))


def gather_cells(rows_UY: torch.Tensor, index_I: torch.Tensor) -> torch.Tensor:
    """Cells [I, Y · ratio²] of rows given by `index_I` [I, ratio²]; -1 is a row of zeros."""
    padded_UY = torch.cat([rows_UY, rows_UY.new_zeros(1, rows_UY.shape[1])])
    return padded_UY[index_I].transpose(1, 2).flatten(1)


class Aligner(nn.Module):
    """Cells of patches to rows of the text model's width."""

    def __init__(self, vision: VisionConfig, build: BuildContext) -> None:
        super().__init__()
        self.ratio = vision.downsample_ratio
        self.w1 = Linear(build, "aligner.w1")
        self.w2 = Linear(build, "aligner.w2")

    def forward(
        self, rows_UY: torch.Tensor, grids: Sequence[Grid], adapter_I: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Image rows [I, C]: ceil(rows / ratio) · ceil(columns / ratio) per image, reading order, images in order.

        `grids` (rows, columns) of patches per image; `adapter_I` int32 adapter per image, None = no adapters.
        """
        cells_ID = unfold_cells(rows_UY, grids, self.ratio)
        adapter_id = None
        if adapter_I is not None:
            cells = [num_cells(grid, self.ratio) for grid in grids]
            counts = torch.tensor(cells, dtype=torch.int64, device=rows_UY.device)
            adapter_id = adapter_I.repeat_interleave(counts, output_size=len(cells_ID))
        return self.project(cells_ID, adapter_id)

    def project(self, cells_ID: torch.Tensor, adapter_id: torch.Tensor | None = None) -> torch.Tensor:
        """Image rows [I, C] of unfolded cells; `adapter_id` int32 [I] adapter per cell."""
        hidden_IC = nn.functional.gelu(self.w1(cells_ID, adapter_id), approximate="none")
        out_IC: torch.Tensor = self.w2(hidden_IC, adapter_id)
        return out_IC
