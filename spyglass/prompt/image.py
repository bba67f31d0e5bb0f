"""From an image and its plan to patches: resize as Pillow does, pad with grey, cut (spec v4 9.2, v41 7.1).

Patches stay uint8. The reference's bf16 value of a pixel, bf16((fp32(u) / 255 - 0.5) / 0.5), is one of 256, so
normalising is a table (`NORMALISED`), applied where the pixels are consumed. Resizing must be Pillow's: it rounds to
8 bits between its two passes, and no faster library does the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from spyglass.errors import PromptError
from spyglass.prompt.decode import (
    PYTHON_LIMITS,
    REFERENCE_RULES,
    ImageInput,
    ImageLimits,
    ImageRules,
    open_image,
    to_rgb,
)
from spyglass.prompt.plan import contained_size
from spyglass.prompt.tokens import ImagePlan

PAD_COLOUR = (127, 127, 127)
_CHANNELS = 3


def patchify(
    image: ImageInput,
    plan: ImagePlan,
    *,
    rules: ImageRules = REFERENCE_RULES,
    limits: ImageLimits = PYTHON_LIMITS,
    name: str = "the image",
) -> NDArray[np.uint8]:
    """Patches of an image, uint8 [N, 3, p, p]: grid rows first, channel-major, bit-equal to the reference before
    normalising.

    `plan` is that of the image's own size (`oriented_size` under `rules`).

    Raises:
        PromptError: the image cannot be read or decoded (see `open_image`, `to_rgb`), or is too thin for its plan.
    """
    return cut(resize(to_rgb(open_image(image, limits=limits, name=name), rules, name=name), plan, name=name), plan)


def resize(rgb: Image.Image, plan: ImagePlan, *, name: str = "the image") -> Image.Image:
    """Resize an RGB image to `plan.resized`: stretched, or contained with its aspect and centred on grey; bicubic.

    Raises:
        PromptError: one side of the contained image would round to 0.
    """
    box = plan.resized
    size = box if plan.stretch else contained_size(rgb.size, box)
    if 0 in size:
        raise PromptError(
            f"{name} is too thin: {rgb.width}x{rgb.height} scaled into {box[0]}x{box[1]} leaves nothing of a side"
        )
    return centre(rgb.resize(size, Image.Resampling.BICUBIC), box)


def centre(resized: Image.Image, box: tuple[int, int]) -> Image.Image:
    """Put an RGB image into the middle of a grey one of the size `box`; one that fills it is returned itself."""
    size = resized.size
    if size == box:
        return resized
    canvas = Image.new("RGB", box, PAD_COLOUR)
    canvas.paste(resized, (round((box[0] - size[0]) * 0.5), round((box[1] - size[1]) * 0.5)))
    return canvas


def cut(resized: Image.Image, plan: ImagePlan) -> NDArray[np.uint8]:
    """Cut an RGB image of the size `plan.resized` into patches, uint8 [N, 3, p, p]."""
    rows, columns = plan.vit_grid
    patch = plan.patch_size
    assert resized.size == plan.resized == (columns * patch, rows * patch), (resized.size, plan)
    # One run of `patch` bytes is one item: the permutation then moves runs, not bytes, which is what makes it cheap.
    run = np.dtype((np.void, patch))
    patches = np.empty((rows, columns, _CHANNELS, patch), run)
    for channel, plane in enumerate(resized.split()):
        lines = np.asarray(plane).view(run).reshape(rows, patch, columns)
        patches[:, :, channel] = lines.transpose(0, 2, 1)
    return patches.view(np.uint8).reshape(rows * columns, _CHANNELS, patch, patch)


def normalisation_table() -> NDArray[np.float32]:
    """The 256 normalised values of a pixel as the reference rounds them to bf16, fp32 [256]."""
    value = (np.arange(256, dtype=np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    return (_bf16_bits(value).astype(np.uint32) << 16).view(np.float32)


def normalise(patches: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """Bit patterns of the bf16 patches that the reference computes, uint16 in the shape of `patches`."""
    bits = _bf16_bits(normalisation_table()).astype(np.uint32)
    if patches.size % 2:
        return bits.astype(np.uint16)[patches]
    pairs = (bits[None, :] | (bits[:, None] << np.uint32(16))).reshape(
        -1
    )  # two neighbouring pixels are one look-up, little-endian
    return _gather(pairs, np.ascontiguousarray(patches).reshape(-1).view("<u2")).view("<u2").reshape(patches.shape)


def _gather(table: NDArray[np.uint32], index: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """`table[index]` in blocks, so that the wide indices numpy insists on stay in cache."""
    block = 16_384
    wide = np.empty(block, np.intp)
    out = np.empty(index.size, np.uint32)
    for start in range(0, index.size, block):
        part = index[start : start + block]
        wide[: part.size] = part
        table.take(wide[: part.size], out=out[start : start + part.size], mode="wrap")
    return out


def _bf16_bits(value: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite fp32 to bf16, nearest even, as bit patterns."""
    bits = value.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
