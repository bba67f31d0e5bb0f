"""Pictures without anything that was taught: pieces of photographs in full colour, and textures made by chance."""

from __future__ import annotations

from importlib.resources import files
from io import BytesIO

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageOps

from spyglass.tiny_world.images import PHOTOS
from spyglass.tiny_world.sayings import dealt

_LEAST = 0.35  # of a photograph's side, that a piece has


def unfamiliar_picture(size: tuple[int, int], rng: Generator, *, train: bool) -> Image.Image:
    """An RGB picture of `size`; the photographs of training are in no other split."""
    kind = int(rng.integers(5))
    if kind < 2:
        return _photograph(size, rng, train=train)
    return (_clouds, _waves, _grain)[kind - 2](size, rng)


def _photograph(size: tuple[int, int], rng: Generator, *, train: bool) -> Image.Image:
    """A piece of a photograph, mirrored and in other light now and then."""
    names = dealt(PHOTOS, train) if train else [name for name in PHOTOS if name not in dealt(PHOTOS, train=True)]
    name = names[int(rng.integers(len(names)))]
    with Image.open(BytesIO((files("spyglass.tiny_world") / "photos" / f"{name}.jpg").read_bytes())) as file:
        photo = file.convert("RGB")
    side = rng.uniform(_LEAST, 1.0) * min(photo.size)
    columns, rows = (max(8, round(side * length / max(size))) for length in size)
    x, y = int(rng.integers(photo.width - columns + 1)), int(rng.integers(photo.height - rows + 1))
    piece = photo.crop((x, y, x + columns, y + rows)).resize(size, Image.Resampling.BICUBIC)
    piece = ImageOps.mirror(piece) if rng.random() < 0.5 else piece
    if rng.random() < 0.5:
        gain = rng.uniform(0.7, 1.3, 3)
        piece = _image(np.asarray(piece, np.float64) * gain)
    return piece.filter(ImageFilter.GaussianBlur(1.5)) if rng.random() < 0.2 else piece


def _clouds(size: tuple[int, int], rng: Generator) -> Image.Image:
    """Soft patches of colour, coarse and fine ones over one another."""
    total = np.full((size[1], size[0], 3), rng.uniform(60, 200, 3))
    for cells in (2, 5, 11, 23):
        rough = rng.normal(0, 90 / cells**0.5, (cells, cells, 3))
        layer = [
            Image.fromarray(rough[:, :, c].astype(np.float32)).resize(size, Image.Resampling.BICUBIC) for c in range(3)
        ]
        total += np.stack([np.asarray(part) for part in layer], axis=2)
    return _image(total)


def _waves(size: tuple[int, int], rng: Generator) -> Image.Image:
    """Stripes and ripples in two colours."""
    y, x = np.mgrid[0 : size[1], 0 : size[0]] / max(size)
    turn, wide = rng.uniform(0, np.pi), rng.uniform(3, 30)
    bent = rng.uniform(0, 0.4) * np.sin(2 * np.pi * rng.uniform(0.5, 3) * (x * np.sin(turn) - y * np.cos(turn)))
    share = 0.5 + 0.5 * np.sin(2 * np.pi * wide * (x * np.cos(turn) + y * np.sin(turn)) + 6 * bent)
    first, second = rng.uniform(0, 255, (2, 3))
    noise = rng.normal(0, rng.uniform(0, 25), (size[1], size[0], 1))
    return _image(share[:, :, None] * first + (1 - share[:, :, None]) * second + noise)


def _grain(size: tuple[int, int], rng: Generator) -> Image.Image:
    cells = int(rng.integers(6, 60))
    grains = rng.uniform(0, 255, 3) + rng.normal(0, rng.uniform(20, 70), (cells, cells, 3))
    return _image(grains).resize(size, (Image.Resampling.BICUBIC, Image.Resampling.NEAREST)[int(rng.integers(2))])


def _image(values: NDArray[np.float64]) -> Image.Image:
    return Image.fromarray(np.clip(values.round(), 0, 255).astype(np.uint8))
