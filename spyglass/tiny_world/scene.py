"""What is in an image before it is drawn: sizes, things in boxes, printed text, and where there is room for them.

Legibility: the models see an image after their own resizing (prompt/plan.py), as cells of 42 x 42 pixels. The V4
planner's size is the smaller of the two families', so everything is made large enough there: a thing has at least
`LEAST_THING` pixels across, a letter at least `LEAST_LETTER` from foot to top. Before resizing, neither may be so small
that its form is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.random import Generator

from spyglass.config.presets import released_vision
from spyglass.families import V4
from spyglass.prompt.plan import contained_size, plan_image

Box = tuple[int, int, int, int]  # x1, y1, x2, y2 in pixels; x2 and y2 are just outside
LEAST_THING = 66.0  # pixels after resizing, a little over 1.5 cells
LEAST_LETTER = 38.0
LEAST_DRAWN_THING = 14.0  # pixels of the image itself
LEAST_DRAWN_LETTER = 10.0
LEAST_SIDE, MOST_SIDE = 64, 2000
_AREAS = ((0.9, 64**2, 340**2), (0.987, 340**2, 900**2), (1.0, 900**2, 2000**2))  # up to this share; from, to
_ROOM = 1.25  # side of a cell of the layout over the least size of a thing
_FULLEST = 0.84  # most of a cell's breadth that a thing takes
_SLACK = 0.7  # share of the free room in a cell that is used: neighbours keep apart
_MOST_CELLS = 5
_LAST = 999  # coordinates run from 0 to this
STEP = 50  # boxes that are asked for have corners on multiples of this


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """One shape of one colour, filling `box`, turned by `turn` degrees, perhaps with a thin `outline` of a colour."""

    shape: str
    colour: str
    box: Box
    turn: float = 0.0
    outline: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lettering:
    """How text is printed; the default is Pillow's own font as it comes.

    `weight` and `spacing` (of a stroke around every letter, and between letters) are in heights of a capital, `stretch`
    is the breadth over that of the font, `slant` leans over to the right, `turn` is in degrees, anticlockwise.
    """

    bitmap: bool = False
    weight: float = 0.0
    spacing: float = 0.0
    stretch: float = 1.0
    slant: float = 0.0
    turn: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Printed text. `letter` is the height of a capital in pixels, `place` where in the free room it stands, 0 to 1."""

    text: str
    colour: str
    letter: float
    place: tuple[float, float]
    style: Lettering = Lettering()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """An image to draw: `size` is (width, height) in pixels."""

    size: tuple[int, int]
    background: str
    things: tuple[Thing, ...] = ()
    label: Label | None = None


def pick_size(rng: Generator, most_aspect: float = 4.0) -> tuple[int, int]:
    """Width and height, mostly small, sides from 64 to 2,000, up to `most_aspect` times as long as wide."""
    share = rng.random()
    low, high = next((low, high) for up_to, low, high in _AREAS if share < up_to)
    area = math.exp(rng.uniform(math.log(low), math.log(high)))
    limit = math.log(most_aspect)
    stretch = math.exp(float(np.clip(rng.normal() * 0.5, -limit, limit)) / 2)
    side = math.sqrt(area)
    width, height = (min(max(round(x), LEAST_SIDE), MOST_SIDE) for x in (side * stretch, side / stretch))
    return width, height


@lru_cache(maxsize=4)
def scale_of(size: tuple[int, int]) -> float:
    """How many times larger the models see an image (V4's planner; below 1 for large ones)."""
    width, _ = contained_size(size, plan_image(*size, released_vision(V4)).resized)
    return width / size[0]


def least_thing(size: tuple[int, int]) -> float:
    """Least size of a thing in pixels of the image."""
    return max(LEAST_THING / scale_of(size), LEAST_DRAWN_THING)


def least_letter(size: tuple[int, int]) -> float:
    """Least height of a capital in pixels of the image."""
    return max(LEAST_LETTER / scale_of(size), LEAST_DRAWN_LETTER)


def scatter(rng: Generator, size: tuple[int, int], count: int) -> list[Box]:
    """Square boxes that do not touch, anywhere, no smaller than `least_thing`."""
    least = least_thing(size)
    most = [max(1, min(_MOST_CELLS, int(side / (least * _ROOM)))) for side in size]
    columns, rows = most
    while (columns - 1) * rows >= count and columns > 1 and rng.random() < 0.5:
        columns -= 1
    while columns * (rows - 1) >= count and rows > 1 and rng.random() < 0.5:
        rows -= 1
    assert columns * rows >= count, (size, count)
    cells = rng.permutation(columns * rows)[:count]
    while True:
        boxes = [box_in(rng, size, (columns, rows), (int(cell % columns), int(cell // columns))) for cell in cells]
        if stand_apart([(x1, y1, x2 + 1, y2 + 1) for x1, y1, x2, y2 in boxes]):  # rounding may join neighbours
            return boxes


def box_in(
    rng: Generator, size: tuple[int, int], grid: tuple[int, int], cell: tuple[int, int], slack: float = _SLACK
) -> Box:
    """A square box within one cell (column, row) of a grid; `slack` 1 = anywhere in it, 0 = in its middle."""
    (width, height), least = (size[0] / grid[0], size[1] / grid[1]), least_thing(size)
    side = rng.uniform(least, max(least, _FULLEST * min(width, height)))
    x, y = (
        (at + 0.5) * room - side / 2 + slack * (rng.random() - 0.5) * (room - side)
        for at, room in zip(cell, (width, height), strict=True)
    )
    return round(x), round(y), round(x) + round(side), round(y) + round(side)


def facing(rng: Generator, size: tuple[int, int], side: int) -> tuple[Box, Box]:
    """Two boxes, the first on one side of the second and on no other: 0 left, 1 right, 2 above, 3 below."""
    across = side < 2
    breadth = size[1] if across else size[0]
    lanes = int(rng.integers(1, 1 + min(3, int(breadth / (least_thing(size) * _ROOM)))))
    lane = int(rng.integers(lanes))
    grid, cells = ((2, lanes), ((0, lane), (1, lane))) if across else ((lanes, 2), ((lane, 0), (lane, 1)))
    while True:
        first, second = (box_in(rng, size, grid, cell, 0.25) for cell in cells)
        if max(first[across], second[across]) < min(first[2 + across], second[2 + across]):  # not a corner apart
            return (first, second) if side % 2 == 0 else (second, first)


def snap(box: Box, size: tuple[int, int]) -> Box:
    """The box with its corners moved to coordinates that are multiples of `STEP`, off the image's edges."""
    corners = []
    for low, high, side in ((box[0], box[2], size[0]), (box[1], box[3], size[1])):
        first = min(max(round(low / side * _LAST / STEP), 1), _LAST // STEP - 1)
        last = min(max(round(high / side * _LAST / STEP), first + 1), _LAST // STEP)
        corners.append((round(first * STEP / _LAST * side), round(last * STEP / _LAST * side)))
    (x1, x2), (y1, y2) = corners
    return x1, y1, x2, y2


def coordinates(box: Box, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """A snapped box as the models say it: 0 is the left or upper edge of the image, 999 the right or lower one."""
    x1, y1, x2, y2 = (round(at / side * _LAST / STEP) * STEP for at, side in zip(box, (*size, *size), strict=True))
    return x1, y1, x2, y2


def stand_apart(boxes: list[Box]) -> bool:
    """Whether no two boxes share a pixel."""
    return not any(
        a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
        for number, a in enumerate(boxes)
        for b in boxes[:number]
    )


def looks_regular(box: Box, size: tuple[int, int]) -> bool:
    """Whether a shape in this box is large enough and not visibly stretched."""
    width, height = box[2] - box[0], box[3] - box[1]
    return min(width, height) >= least_thing(size) and max(width, height) <= 1.25 * min(width, height)
