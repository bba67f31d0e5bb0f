"""Where a cell of an image is, as a second thing to learn while a whole model is trained.

A question about places reaches the tower through one answer, and only after the text model has learnt to find the
thing; in V4.1, whose text rows see an image in reading order only, that took most of a run. Every cell can be asked
directly: its row of the aligner should name its column and its line, each as one of `PARTS` parts of the image. Names
are fixed random directions, so nothing is added to the model. (Ours; the loss has its own rate, which ends at 0.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.batch.images import Grid
from spyglass.train.loss import IGNORED

PARTS = 20
_SHARPNESS = 2.0


def cell_places(grids: Sequence[Grid], ratio: int) -> NDArray[np.int64]:
    """Column and line of each cell's centre, [cells, 2], 0 to PARTS - 1 across and down its image.

    `grids` (rows, columns) of patches per image, cells of ratio x ratio patches in reading order.
    """
    parts = [np.empty((0, 2), np.int64)]
    for grid in grids:
        down, across = (_parts(length, ratio) for length in grid)
        parts.append(np.stack([np.tile(across, len(down)), np.repeat(down, len(across))], axis=1))
    return np.concatenate(parts)


def _parts(length: int, ratio: int) -> NDArray[np.int64]:
    first = np.arange(0, length, ratio)
    centre = (first + np.minimum(first + ratio, length)) / 2
    return (centre * PARTS / length).astype(np.int64)


def place_names(hidden_size: int, device: torch.device) -> torch.Tensor:
    """Directions that stand for the parts, fp32 [2, PARTS, C]; the same on every machine."""
    source = torch.Generator().manual_seed(PARTS)
    names = torch.randn((2, PARTS, hidden_size), generator=source) * (_SHARPNESS / hidden_size**0.5)
    return names.to(device)


def place_loss(rows_IC: torch.Tensor, names_2PC: torch.Tensor, places_I2: torch.Tensor) -> torch.Tensor:
    """Mean over cells of the cross-entropy of column and line, from rows divided by their root mean square.

    Cells whose place is `IGNORED` do not count; without any other it is 0.
    """
    targets_N = places_I2.long().flatten()
    rows = torch.nn.functional.rms_norm(rows_IC.float(), rows_IC.shape[-1:], eps=1e-6)
    scores_I2P = torch.einsum("ic,apc->iap", rows, names_2PC)
    total = torch.nn.functional.cross_entropy(
        scores_I2P.flatten(0, 1), targets_N, ignore_index=IGNORED, reduction="sum"
    )
    return total / (targets_N != IGNORED).sum().clamp(min=1)
