"""What a prompt is: ids, what kind of thing stands at each position, and the images behind them."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class TokenKind(IntEnum):
    """Role of one position. The image roles have the numbers of the reference (spec v4 9.5); text is -1."""

    TEXT = -1
    START = 0
    PAD = 1
    IMAGE = 2
    NEWLINE = 3
    END = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """How one image is resized and cut (spec v4 9.1). Sizes (w, h) are pixels, grids (h, w) are cells.

    `num_tokens` counts the block without leading pads; `stretch` = plain resize instead of contain-and-pad.
    """

    resized: tuple[int, int]
    vit_grid: tuple[int, int]
    llm_grid: tuple[int, int]
    num_tokens: int
    stretch: bool
    patch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """The token block of one image at a prompt position.

    `start`: position of the first token of the block, leading pads included. `lead`: leading pads, outside the span
    of mutual visibility. `kinds` int8 [n] over the whole block; `order` int32 [num IMAGE]: aligner row of the k-th
    IMAGE slot.
    """

    image: int  # index into Prompt.patches / plans / digests
    start: int
    lead: int
    kinds: NDArray[np.int8]
    order: NDArray[np.int32]

    @property
    def length(self) -> int:
        return len(self.kinds)


@dataclass(frozen=True, slots=True)
class Patches:
    """An image that is already cut, as one part of a prompt.

    `pixels` [N, 3, p, p]: uint8, or finite floats that are already normalised. `vit_grid` (rows, columns), N = rows *
    columns. Nothing is checked here: `prompt_from_parts` does, and its errors name the image.
    """

    pixels: NDArray[Any]
    vit_grid: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt ready to run. Positions are 0..T-1. Image positions hold id -1: ids are never inspected to find
    images.

    `image_row_T` int32: row of the concatenated aligner outputs for IMAGE positions, -1 elsewhere. `visible_T2`
    int32: extra keys visible left (beyond nothing) and right of each position: (i - START, END - i) inside a span
    whose layout is bidirectional, (0, 0) elsewhere. `digests` hold pixels and plan of each image.
    """

    ids_T: NDArray[np.int32]
    kinds_T: NDArray[np.int8]
    spans: tuple[ImageSpan, ...]
    image_row_T: NDArray[np.int32]
    visible_T2: NDArray[np.int32]
    patches: tuple[
        NDArray[np.uint8] | NDArray[np.float32], ...
    ]  # [N, 3, p, p]; uint8 pixels, or already normalised floats
    plans: tuple[ImagePlan, ...]
    digests: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.ids_T)


def prompt_digest(pixels: NDArray[Any], plan: ImagePlan) -> bytes:
    """What caches know an image by: SHA-256 over dtype, shape, plan and every byte of `pixels` [N, 3, p, p]; 32 bytes.

    The prompt position of the image is left out: the same image elsewhere has other leading pads but the same rows.
    """
    facts = (
        *pixels.shape,
        *plan.resized,
        *plan.vit_grid,
        *plan.llm_grid,
        plan.num_tokens,
        plan.stretch,
        plan.patch_size,
    )
    digest = hashlib.sha256(f"{pixels.dtype.str} {pixels.ndim} ".encode())
    digest.update(struct.pack(f"<{len(facts)}q", *facts))
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()
