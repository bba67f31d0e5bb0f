"""A second way to see: shapes and colours found in the pixels alone, without the scene they were drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

PALETTE = {
    "red": (214, 32, 38),
    "orange": (246, 138, 16),
    "yellow": (244, 222, 40),
    "green": (34, 146, 58),
    "blue": (32, 72, 212),
    "purple": (138, 48, 168),
    "black": (18, 18, 20),
    "white": (250, 250, 248),
}
_NEAR = 14  # a colour is drawn at most 10 away in each channel
_SPECKS = 30  # pixels: smaller patches are not things


@dataclass(frozen=True)
class Seen:
    colour: str
    shape: str
    box: tuple[int, int, int, int]

    @property
    def centre(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2


def see(picture: Image.Image) -> list[Seen]:
    """Every thing in a picture: patches of a palette colour, named by how they fill their box."""
    measure = pytest.importorskip("skimage.measure", reason="patches are found with scikit-image")
    pixels = np.asarray(picture).astype(int)
    found = []
    for colour, value in PALETTE.items():
        patches = measure.label((np.abs(pixels - value) <= _NEAR).all(-1), connectivity=2)
        for patch in measure.regionprops(patches):
            if patch.area >= _SPECKS:
                top, left, bottom, right = patch.bbox
                found.append(Seen(colour, _shape(patch.image), (left, top, right, bottom)))
    return found


def _shape(mask: np.ndarray) -> str:
    """By what is filled at telling places of the box."""
    rows, columns = mask.shape

    def at(down: float, right: float) -> bool:
        return bool(mask[int(down * rows), int(right * columns)])

    if not at(0.5, 0.5):
        return "ring"
    if mask.mean() > 0.93:
        return "square"
    if all(at(down, right) for down in (0.22, 0.77) for right in (0.22, 0.77)):
        return "circle"
    if mask[-(rows // 8) :].mean() > 0.75:
        return "triangle"
    return "cross" if at(0.9, 0.5) else "star"
