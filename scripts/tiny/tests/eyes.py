"""A second way to see: shapes and colours found in the pixels alone, without the scene they were drawn from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from PIL import Image

PALETTE = {  # lowest and highest value of each channel
    "red": ((185, 0, 0), (255, 65, 65)),
    "orange": ((238, 112, 0), (255, 168, 45)),
    "yellow": ((235, 210, 0), (255, 255, 70)),
    "green": ((0, 125, 0), (50, 255, 72)),
    "blue": ((0, 0, 178), (65, 112, 255)),
    "purple": ((112, 0, 110), (165, 60, 240)),
    "black": ((0, 0, 0), (26, 26, 26)),
    "white": ((242, 242, 242), (255, 255, 255)),
}
_SPECKS = 30  # pixels: smaller patches are not things
_RIM = 0.2  # most of a thing's side that its outline takes, at the tips of a star


@dataclass(frozen=True)
class Seen:
    colour: str
    shape: str
    box: tuple[int, int, int, int]
    area: int

    @property
    def centre(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2


def see(image: Image.Image) -> list[Seen]:
    """Every thing in an image: patches of a palette colour that is not the background's, named by their form."""
    measure = pytest.importorskip("skimage.measure", reason="patches are found with scikit-image")
    pixels = np.asarray(image).astype(int)
    found = []
    for colour, (low, high) in PALETTE.items():
        covered = ((pixels >= low) & (pixels <= high)).all(-1)
        if background_is(covered):
            continue
        for patch in measure.regionprops(measure.label(covered, connectivity=2)):
            if patch.area >= _SPECKS / 3:
                top, left, bottom, right = patch.bbox
                found.append(Seen(colour, _shape(patch), (left, top, right, bottom), int(patch.area)))
    return without_outlines(found)


def background_is(covered: np.ndarray) -> bool:
    """Whether most of the image's edge is of one colour."""
    edge = np.concatenate([covered[0], covered[-1], covered[:, 0], covered[:, -1]])
    return bool(edge.mean() > 0.5)


def without_outlines(found: list[Seen]) -> list[Seen]:
    """A thing and the smaller patches that closely surround it, its outline or pieces of one, are one thing."""
    things = []
    for thing in found:
        if not any(_belongs(thing, other) for other in found):
            boxes = np.array([thing.box, *(piece.box for piece in found if _belongs(piece, thing))])
            left, top, right, bottom = (*boxes.min(0)[:2].tolist(), *boxes.max(0)[2:].tolist())
            things.append(replace(thing, box=(left, top, right, bottom)))
    return [thing for thing in things if thing.area >= _SPECKS]


def _belongs(piece: Seen, thing: Seen) -> bool:
    room = _RIM * max(thing.box[2] - thing.box[0], thing.box[3] - thing.box[1]) + 1
    away = (
        *(t - p for t, p in zip(thing.box[:2], piece.box[:2], strict=True)),
        *(p - t for t, p in zip(thing.box[2:], piece.box[2:], strict=True)),
    )
    return piece.area < thing.area and max(away) <= room


def _shape(patch: object) -> str:
    """By holes, arms if it is far from filling its hull, and how much it fills of the tightest rectangle around it."""
    mask = patch.image  # type: ignore[attr-defined]
    rows, columns = mask.shape
    if not mask[rows // 2 - rows // 16 : rows // 2 + rows // 16 + 1, columns // 2].any():
        return "ring"
    if patch.solidity < 0.85:  # type: ignore[attr-defined]
        return "star" if arms(mask, 5) > arms(mask, 4) else "cross"
    fullness = mask.sum() / tightest_rectangle(mask)
    return "square" if fullness > 0.88 else "circle" if fullness > 0.65 else "triangle"


def tightest_rectangle(mask: np.ndarray) -> float:
    """Area of the smallest rectangle, turned by any whole number of degrees, around the pixels of a mask."""
    down, right = np.nonzero(mask)
    angles = np.radians(np.arange(90))[:, None]
    across = right * np.cos(angles) + down * np.sin(angles)
    along = down * np.cos(angles) - right * np.sin(angles)
    return float(((np.ptp(across, axis=1) + 1) * (np.ptp(along, axis=1) + 1)).min())


def arms(mask: np.ndarray, count: int) -> float:
    """How strongly a mask spreads from its centre of mass in so many directions, evenly apart."""
    down, right = (np.nonzero(mask)[axis] - np.nonzero(mask)[axis].mean() for axis in (0, 1))
    angles = np.arctan2(down, right)
    return float(abs((np.hypot(down, right) ** 3 * np.exp(1j * count * angles)).sum()))
