"""Images of one call of the tower, checked against one another and packed.

Patches, grids and image positions of the prompt come from three places; all of each must be used up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.batch.types import ImageBatch
from spyglass.config.model import VisionConfig
from spyglass.errors import PromptError
from spyglass.prompt.image import normalisation_table

PatchArray = NDArray[Any] | torch.Tensor
Grid = tuple[int, int]


def num_cells(grid: Grid, ratio: int) -> int:
    """Rows the aligner makes of a (rows, columns) grid of patches: ratio x ratio patches each, the last ones padded."""
    return -(-grid[0] // ratio) * -(-grid[1] // ratio)


def pack_images(
    patches: Sequence[PatchArray],
    vit_grids: Sequence[Grid],
    vision: VisionConfig,
    *,
    device: torch.device | str = "cpu",
    adapter_ids: Sequence[int] | None = None,
) -> ImageBatch:
    """Pack the images of one step, which `check_images` has seen, in the order given.

    `patches` per image [N, 3, p, p]: uint8 pixels, or floats already normalised. `vit_grids` (rows, columns) of
    patches. `adapter_ids`: adapter of each image, 0 = none. Pixels stay uint8 when all images have pixels; otherwise
    all become float32.
    """
    grids = tuple((int(rows), int(columns)) for rows, columns in vit_grids)
    return ImageBatch(
        patches_U=_join([_tensor(pixels) for pixels in patches], vision.patch_size).to(device),
        grids_I2=grids,
        cu_seqlens_I1=torch.tensor(offsets(grids), dtype=torch.int32, device=device),
        adapter_I=torch.tensor(
            [0] * len(grids) if adapter_ids is None else list(adapter_ids), dtype=torch.int32, device=device
        ),
    )


def share_images(images: ImageBatch, ranks: int, vision: VisionConfig) -> tuple[list[ImageBatch | None], list[int]]:
    """The images cut into one run for each rank, with about as many patches each, and the rows that each run gives.

    None = no image for that rank; the first has some.
    """
    first = offsets(images.grids_I2)
    owner = [(start + stop) * ranks // (2 * first[-1]) for start, stop in pairwise(first)]
    owner = [rank - owner[0] for rank in owner]
    parts: list[ImageBatch | None] = []
    rows = []
    for rank in range(ranks):
        run = [number for number, one in enumerate(owner) if one == rank]
        grids = tuple(images.grids_I2[number] for number in run)
        rows.append(sum(num_cells(grid, vision.downsample_ratio) for grid in grids))
        if not run:
            parts.append(None)
            continue
        cut = slice(first[run[0]], first[run[-1] + 1])
        device = images.patches_U.device
        parts.append(
            ImageBatch(
                patches_U=images.patches_U[cut].clone(),
                grids_I2=grids,
                cu_seqlens_I1=torch.tensor(offsets(grids), dtype=torch.int32, device=device),
                adapter_I=images.adapter_I[run[0] : run[-1] + 1].clone(),
            )
        )
    return parts, rows


def check_images(
    patches: Sequence[PatchArray], vit_grids: Sequence[Grid], image_positions: Sequence[int], vision: VisionConfig
) -> None:
    """Whether images can be packed; `image_positions`: IMAGE positions each fills in its prompt (`len(span.order)`).

    Raises:
        PromptError: the three lists differ in length, or patches, grid and positions of an image do not agree.
    """
    if len({len(patches), len(vit_grids), len(image_positions)}) > 1:
        missing = min(len(patches), len(vit_grids), len(image_positions))
        raise PromptError(
            f"{len(patches)} images have patches, {len(vit_grids)} have a grid and {len(image_positions)} have image "
            f"positions in the prompt; image {missing} is missing from at least one of the three lists"
        )
    for image, (pixels, grid, positions) in enumerate(zip(patches, vit_grids, image_positions, strict=True)):
        _check_image(image, pixels, grid, positions, vision)


def offsets(grids: Sequence[Grid]) -> tuple[int, ...]:
    """First patch of each image in the packed batch, and the total: I + 1 numbers."""
    return (0, *accumulate(int(rows) * int(columns) for rows, columns in grids))


def _check_image(image: int, pixels: PatchArray, grid: Grid, positions: int, vision: VisionConfig) -> None:
    rows, columns = grid
    side, ratio = vision.patch_size, vision.downsample_ratio
    if rows < 1 or columns < 1:
        raise PromptError(f"image {image}: its grid is {rows} x {columns} patches; both must be at least 1")
    if tuple(pixels.shape[1:]) != (3, side, side):
        raise PromptError(
            f"image {image}: patches have shape {list(pixels.shape)}; expected [N, 3, {side}, {side}], channels first"
        )
    is_float = pixels.is_floating_point() if isinstance(pixels, torch.Tensor) else pixels.dtype.kind == "f"
    if pixels.dtype not in (np.dtype(np.uint8), torch.uint8) and not is_float:
        raise PromptError(
            f"image {image}: patches are {pixels.dtype}; give uint8 pixels or floats that are already normalised"
        )
    if len(pixels) != rows * columns:
        raise PromptError(
            f"image {image}: its grid of {rows} x {columns} needs {rows * columns} patches, {len(pixels)} were given"
        )
    if positions != num_cells(grid, ratio):
        raise PromptError(
            f"image {image}: {positions} image positions stand in the prompt, but its grid of {rows} x {columns} "
            f"patches gives {num_cells(grid, ratio)} rows ({ratio} x {ratio} patches each)"
        )


def _tensor(patches: PatchArray) -> torch.Tensor:
    """The same values as a tensor; a read-only or strided array is copied, torch cannot hold either."""
    return (
        patches if isinstance(patches, torch.Tensor) else torch.from_numpy(np.require(patches, requirements=["C", "W"]))
    )


def _join(images: list[torch.Tensor], side: int) -> torch.Tensor:
    if not images:
        return torch.empty(0, 3, side, side, dtype=torch.uint8)
    if all(image.dtype == torch.uint8 for image in images):
        return torch.cat(images)
    table = torch.from_numpy(normalisation_table())
    return torch.cat([table[p.long().cpu()].to(p.device) if p.dtype == torch.uint8 else p.float() for p in images])
