"""From a scene to pixels: a muted background, bright shapes with smooth edges, printed text.

Backgrounds keep to the middle of the brightness range and to weak colours, so that every colour of a thing, black and
white included, stands out.
"""

from __future__ import annotations

import math
from importlib.resources import files
from io import BytesIO

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from spyglass.tiny_world.scene import Box, Label, Scene, Thing
from spyglass.tiny_world.words import COLOURS

BACKGROUNDS = ("plain", "noise", "gradient", "photo")
PHOTOS = ("brick", "coffee", "fur", "grass", "gravel", "launch")
_DARKEST, _LIGHTEST = 62, 205
_NOISE_TILE = 96
_CAPITAL = 0.7  # height of a capital of the font over its size
_ARM = 0.36  # breadth of a cross's arm
_HOLE = 0.27  # from a ring's edge to its hole


def draw(scene: Scene, rng: Generator) -> Image.Image:
    """The picture of a scene, RGB. `rng` decides the background and slight changes of the colours."""
    picture = _background(scene.background, scene.size, rng)
    for thing in scene.things:
        picture.paste(_near(thing.colour, rng), thing.box, shape_mask(thing))
    if scene.label is not None:
        _print(picture, scene.label, _near(scene.label.colour, rng))
    return picture


def invert(picture: Image.Image) -> Image.Image:
    """The negative of an RGB picture."""
    return picture.point([255 - value for value in range(256)] * 3)


def shape_mask(thing: Thing) -> Image.Image:
    """How much of each pixel of its box a thing covers, 0 to 255."""
    width, height = thing.box[2] - thing.box[0], thing.box[3] - thing.box[1]
    fine = 4 if max(width, height) < 120 else 2
    w, h = width * fine, height * fine
    mask = Image.new("L", (w, h))
    pen = ImageDraw.Draw(mask)
    if thing.shape == "circle":
        pen.ellipse((0, 0, w - 1, h - 1), fill=255)
    elif thing.shape == "ring":
        pen.ellipse((0, 0, w - 1, h - 1), fill=255)
        pen.ellipse((_HOLE * w, _HOLE * h, (1 - _HOLE) * w - 1, (1 - _HOLE) * h - 1), fill=0)
    else:
        pen.polygon([(x * (w - 1), y * (h - 1)) for x, y in _outline(thing.shape)], fill=255)
    return mask.reduce(fine)


def label_box(label: Label, size: tuple[int, int]) -> Box:
    """Where the letters of a label are in a picture of this size."""
    left, top, right, bottom = _font(label).getbbox(label.text, stroke_width=_stroke(label))
    width, height = math.ceil(right - left), math.ceil(bottom - top)
    x, y = (round(at * (room - used)) for at, room, used in zip(label.place, size, (width, height), strict=True))
    return x, y, x + width, y + height


def widest_letter(text: str, bold: bool, width: int) -> float:
    """Height of a capital at which `text` is as broad as `width` pixels."""
    trial = Label(text=text, colour="black", letter=40.0, bold=bold, place=(0.0, 0.0))
    left, _, right, _ = label_box(trial, (width, width))
    return 40.0 * width / (right - left)


def _print(picture: Image.Image, label: Label, colour: tuple[int, int, int]) -> None:
    font, stroke = _font(label), _stroke(label)
    left, top, _, _ = font.getbbox(label.text, stroke_width=stroke)
    x, y, _, _ = label_box(label, picture.size)
    ImageDraw.Draw(picture).text((x - left, y - top), label.text, colour, font, stroke_width=stroke)


def _font(label: Label) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(round(label.letter / _CAPITAL))
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


def _stroke(label: Label) -> float:
    return round(label.letter / 20) if label.bold else 0


def _outline(shape: str) -> list[tuple[float, float]]:
    """Corners in a box from 0 to 1."""
    if shape == "square":
        return [(0, 0), (1, 0), (1, 1), (0, 1)]
    if shape == "triangle":
        return [(0.5, 0), (1, 1), (0, 1)]
    if shape == "cross":
        a, b = (1 - _ARM) / 2, (1 + _ARM) / 2
        return [(a, 0), (b, 0), (b, a), (1, a), (1, b), (b, b), (b, 1), (a, 1), (a, b), (0, b), (0, a), (a, a)]
    assert shape == "star", shape
    turns = [math.pi * (step / 5 - 0.5) for step in range(10)]
    points = [
        ((1.0, 0.42)[step % 2] * math.cos(t), (1.0, 0.42)[step % 2] * math.sin(t)) for step, t in enumerate(turns)
    ]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return [((x - min(xs)) / (max(xs) - min(xs)), (y - min(ys)) / (max(ys) - min(ys))) for x, y in points]


def _near(colour: str, rng: Generator) -> tuple[int, int, int]:
    red, green, blue = np.clip(np.array(COLOURS[colour]) + rng.integers(-10, 11, 3), 0, 255).tolist()
    return red, green, blue


def _muted(rng: Generator) -> NDArray[np.float64]:
    """A greyish colour, [3]."""
    return rng.uniform(100, 170) + rng.uniform(-12, 12, 3)


def _background(kind: str, size: tuple[int, int], rng: Generator) -> Image.Image:
    base = _muted(rng)
    if kind == "plain":
        red, green, blue = (round(value) for value in base.tolist())
        return Image.new("RGB", size, (red, green, blue))
    if kind == "gradient":
        corners = base + rng.uniform(-45, 45, (2, 2, 1)) + rng.uniform(-8, 8, (2, 2, 3))
        return _enlarged(corners, size)
    if kind == "photo":
        return _photo(base, size, rng)
    assert kind == "noise", kind
    tile = base + rng.normal(0, rng.uniform(6, 22), (_NOISE_TILE, _NOISE_TILE, 3))
    rows, columns = -(-size[1] // _NOISE_TILE), -(-size[0] // _NOISE_TILE)
    return Image.fromarray(np.tile(_bytes(tile), (rows, columns, 1))[: size[1], : size[0]])


def _photo(base: NDArray[np.float64], size: tuple[int, int], rng: Generator) -> Image.Image:
    """A piece of a photograph, its colours half as strong, less contrast, its mean colour half way to `base`."""
    name = PHOTOS[rng.integers(len(PHOTOS))]
    with Image.open(BytesIO((files("spyglass.tiny_world") / "photos" / f"{name}.jpg").read_bytes())) as file:
        photo = np.asarray(file.convert("RGB"), np.float64)
    photo = (photo + photo.mean(-1, keepdims=True)) / 2
    longest = max(size)
    least = rng.uniform(0.4, 1.0) * len(photo)
    rows, columns = (max(8, round(least * side / longest)) for side in size[::-1])
    y, x = rng.integers(len(photo) - rows + 1), rng.integers(len(photo) - columns + 1)
    piece = photo[y : y + rows, x : x + columns]
    mean = piece.mean((0, 1))
    return _enlarged(base * 0.5 + mean * 0.5 + (piece - mean) * rng.uniform(0.35, 0.6), size)


def _enlarged(pixels: NDArray[np.float64], size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(_bytes(pixels)).resize(size, Image.Resampling.BILINEAR)


def _bytes(pixels: NDArray[np.float64]) -> NDArray[np.uint8]:
    return np.clip(pixels.round(), _DARKEST, _LIGHTEST).astype(np.uint8)
