"""From a scene to pixels: a background, bright shapes, printed text.

Muted backgrounds keep to the middle of the brightness range and to weak colours, so that every colour of a thing, black
and white included, stands out. The others are white or black, and nothing in such an image is.
"""

from __future__ import annotations

import math
from functools import lru_cache
from importlib.resources import files
from io import BytesIO

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageFont, ImageStat

from spyglass.tiny_world.scene import Box, Label, Lettering, Scene, Thing
from spyglass.tiny_world.words import COLOURS, Rgb

MUTED = ("plain", "noise", "gradient", "photo")
PHOTOS = ("brick", "coffee", "fur", "grass", "gravel", "launch")
_DARKEST, _LIGHTEST = 62, 205
_NOISE_TILE = 64
_CAPITAL = 0.7  # height of a capital of the font over its size
_BITMAP, _BITMAP_CAPITAL = (6, 11), 6  # pixels of a letter of the bitmap font, and of its capitals
_TRIAL = 40.0  # pixels of a capital when the breadth of a text is measured
_SMOOTH = 0.5  # share of the images whose shapes have smooth edges
_PURE = 0.4  # share of the things in a pure colour
_RIM = 0.035  # breadth of an outline over the size of its thing
_ARM = 0.36  # breadth of a cross's arm
_HOLE = 0.27  # from a ring's edge to its hole


def draw(scene: Scene, rng: Generator) -> Image.Image:
    """The image of a scene, RGB. `rng` decides the background, the shades of the colours and how smooth edges are."""
    image = _background(scene.background, scene.size, rng)
    smooth = bool(rng.random() < _SMOOTH)
    for thing in scene.things:
        if thing.outline is not None:
            image.paste(shade(thing.outline, rng), thing.box, shape_mask(thing, smooth=smooth))
        image.paste(shade(thing.colour, rng), thing.box, shape_mask(thing, smooth=smooth, inside=True))
    if scene.label is not None:
        mask = label_mask(scene.label)
        image.paste(shade(scene.label.colour, rng), label_box(scene.label, scene.size), mask)
    return image


def invert(image: Image.Image) -> Image.Image:
    """The negative of an RGB image."""
    return image.point([255 - value for value in range(256)] * 3)


def shape_mask(thing: Thing, *, smooth: bool = True, inside: bool = False) -> Image.Image:
    """How much of each pixel of its box a thing covers, 0 to 255; what is `inside` leaves its outline out."""
    width, height = thing.box[2] - thing.box[0], thing.box[3] - thing.box[1]
    fine = (4 if max(width, height) < 120 else 2) if smooth else 1
    w, h = width * fine, height * fine
    rim = fine * max(1, round(_RIM * min(width, height))) if inside and thing.outline is not None else 0
    mask = Image.new("L", (w, h))
    pen = ImageDraw.Draw(mask)
    if thing.shape in ("circle", "ring"):
        pen.ellipse((0, 0, w - 1, h - 1), fill=255, outline=0 if rim else None, width=rim)
        if thing.shape == "ring":
            pen.ellipse((_HOLE * w, _HOLE * h, (1 - _HOLE) * w - 1, (1 - _HOLE) * h - 1), fill=0)
    else:
        corners = [(x * (w - 1), y * (h - 1)) for x, y in _turned(_corners(thing.shape), thing.turn)]
        pen.polygon(corners, fill=255, outline=0 if rim else None, width=rim)
    return mask.reduce(fine) if smooth else mask


def label_box(label: Label, size: tuple[int, int]) -> Box:
    """Where the letters of a label are in an image of this size."""
    width, height = label_mask(label).size
    x, y = (round(at * (room - used)) for at, room, used in zip(label.place, size, (width, height), strict=True))
    return x, y, x + width, y + height


def largest_letter(text: str, style: Lettering, size: tuple[int, int]) -> float:
    """Height of a capital at which `text` is as broad or as high as the image."""
    width, height = label_mask(Label(text=text, colour="black", letter=_TRIAL, place=(0.0, 0.0), style=style)).size
    return _TRIAL * min(size[0] / width, size[1] / height)


@lru_cache(maxsize=2)
def label_mask(label: Label) -> Image.Image:
    """How much of each pixel the letters of a label cover, 0 to 255, cut off where they end."""
    style = label.style
    mask = _bitmap_letters(label) if style.bitmap else _letters(label)
    if (style.stretch, style.slant, style.turn) != (1.0, 0.0, 0.0):
        mask = _bent(mask, style)
    return mask.crop(mask.getbbox())


def _letters(label: Label) -> Image.Image:
    """In Pillow's font, one by one if they stand apart; with a margin that is cut off later."""
    font = ImageFont.load_default(round(label.letter / _CAPITAL))
    assert isinstance(font, ImageFont.FreeTypeFont)
    stroke, apart = round(label.style.weight * label.letter), label.style.spacing * label.letter
    pieces = [*label.text] if apart else [label.text]
    steps = [font.getlength(piece) + apart for piece in pieces]
    mask = Image.new(
        "L", (math.ceil(sum(steps) + label.letter + 2 * stroke), math.ceil(1.8 * label.letter + 2 * stroke))
    )
    pen, x = ImageDraw.Draw(mask), stroke + 0.3 * label.letter
    for piece, step in zip(pieces, steps, strict=True):
        pen.text((x if apart else round(x), stroke), piece, 255, font, stroke_width=stroke)
        x += step
    return mask


def _bitmap_letters(label: Label) -> Image.Image:
    """In Pillow's old font of 6 x 11 pixels, enlarged without smoothing."""
    font = ImageFont.load_default_imagefont()
    step = round(_BITMAP[0] + label.style.spacing * _BITMAP_CAPITAL)
    mask = Image.new("1", (step * len(label.text), _BITMAP[1]))
    for number, letter in enumerate(label.text):
        ImageDraw.Draw(mask).text((number * step, 0), letter, 1, font)
    scale = label.letter / _BITMAP_CAPITAL
    return mask.convert("L").resize((round(mask.width * scale), round(mask.height * scale)), Image.Resampling.NEAREST)


def _bent(mask: Image.Image, style: Lettering) -> Image.Image:
    """Stretched, then slanted, then turned, all about the middle."""
    cos, sin = math.cos(math.radians(style.turn)), math.sin(math.radians(style.turn))
    forward = np.array([[cos, sin], [-sin, cos]]) @ np.array([[style.stretch, -style.slant], [0.0, 1.0]])
    old = np.array(mask.size)
    new = np.ceil(np.abs(forward) @ old).astype(int) + 2
    back = np.linalg.inv(forward)
    offset = old / 2 - back @ (new / 2)
    (a, b), (d, e) = back.tolist()
    affine = (a, b, float(offset[0]), d, e, float(offset[1]))
    return mask.transform((int(new[0]), int(new[1])), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR)


def shade(colour: str, rng: Generator) -> Rgb:
    """One of the RGB values that a colour's name means, often a pure one."""
    shades = COLOURS[colour]
    if rng.random() < _PURE:
        return shades.pure[rng.integers(len(shades.pure))]
    red, green, blue = rng.integers(shades.low, shades.high, endpoint=True).tolist()
    return red, green, blue


def _corners(shape: str) -> list[tuple[float, float]]:
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


def _turned(corners: list[tuple[float, float]], degrees: float) -> list[tuple[float, float]]:
    """Turned, and stretched so that they fill the box from 0 to 1 again."""
    if not degrees:
        return corners
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    xs, ys = [cos * x - sin * y for x, y in corners], [sin * x + cos * y for x, y in corners]
    wide, high = max(xs) - min(xs), max(ys) - min(ys)
    return [((x - min(xs)) / wide, (y - min(ys)) / high) for x, y in zip(xs, ys, strict=True)]


def _background(kind: str, size: tuple[int, int], rng: Generator) -> Image.Image:
    if kind in COLOURS:
        return Image.new("RGB", size, shade(kind, rng))
    base = rng.uniform(100, 170) + rng.uniform(-12, 12, 3)
    if kind == "plain":
        red, green, blue = (round(value) for value in base.tolist())
        return Image.new("RGB", size, (red, green, blue) if rng.random() < _PURE else (green, green, green))
    if kind == "gradient":
        corners = base + rng.uniform(-45, 45, (2, 2, 1)) + rng.uniform(-8, 8, (2, 2, 3))
        return Image.fromarray(_bytes(corners)).resize(size, Image.Resampling.BILINEAR)
    if kind == "photo":
        return _photo(base, size, rng)
    assert kind == "noise", kind
    noise = rng.standard_normal((_NOISE_TILE, _NOISE_TILE, 3), np.float32)
    tile = _bytes(base + noise * rng.uniform(6, 18))
    rows, columns = -(-size[1] // _NOISE_TILE), -(-size[0] // _NOISE_TILE)
    return Image.fromarray(np.tile(tile, (rows, columns, 1))[: size[1], : size[0]])


@lru_cache(maxsize=len(PHOTOS))
def _weak_photo(name: str) -> Image.Image:
    """A photograph with its colours half as strong."""
    with Image.open(BytesIO((files("spyglass.tiny_world") / "photos" / f"{name}.jpg").read_bytes())) as file:
        return ImageEnhance.Color(file.convert("RGB")).enhance(0.5)


def _photo(base: NDArray[np.float64], size: tuple[int, int], rng: Generator) -> Image.Image:
    """A piece of a photograph, its colours half as strong, less contrast, its mean colour half way to `base`."""
    photo = _weak_photo(PHOTOS[rng.integers(len(PHOTOS))])
    longest = max(size)
    least = rng.uniform(0.4, 1.0) * min(photo.size)
    columns, rows = (max(8, round(least * side / longest)) for side in size)
    x, y = int(rng.integers(photo.width - columns + 1)), int(rng.integers(photo.height - rows + 1))
    piece = photo.crop((x, y, x + columns, y + rows))
    mean = np.array(ImageStat.Stat(piece).mean)
    table = _bytes(base * 0.5 + mean * 0.5 + (np.arange(256)[:, None] - mean) * rng.uniform(0.35, 0.6))
    return piece.point(table.T.flatten().tolist()).resize(size, Image.Resampling.BILINEAR)


def _bytes(pixels: NDArray[np.float64]) -> NDArray[np.uint8]:
    return np.clip(pixels.round(), _DARKEST, _LIGHTEST).astype(np.uint8)
