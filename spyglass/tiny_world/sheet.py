"""A contact sheet of an evaluation: images, questions, answers, right ones framed green and wrong ones red."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from spyglass.prompt.answers import parse_answer
from spyglass.tiny_world.evaluate import Verdict

_COLUMNS = 6
_TILE = (300, 250)
_IMAGES = 130  # height kept for them
_LETTERS = 42  # a line
_LINE = 15
_MOST_LINES = 7
_RIGHT, _WRONG = (30, 140, 60), (200, 30, 30)


def contact_sheet(verdicts: Sequence[Verdict], most: int = 48) -> Image.Image:
    """An image of at most `most` verdicts: half of them wrong ones where there are enough, in the order asked."""
    chosen = _choose(verdicts, most)
    rows = -(-len(chosen) // _COLUMNS)
    sheet = Image.new("RGB", (_COLUMNS * _TILE[0], rows * _TILE[1]), "white")
    for number, verdict in enumerate(chosen):
        sheet.paste(_tile(verdict), (number % _COLUMNS * _TILE[0], number // _COLUMNS * _TILE[1]))
    return sheet


def _choose(verdicts: Sequence[Verdict], most: int) -> list[Verdict]:
    wrong = [number for number, verdict in enumerate(verdicts) if not verdict.right]
    right = [number for number, verdict in enumerate(verdicts) if verdict.right]
    num_wrong = min(len(wrong), max(most // 2, most - len(right)))
    return [verdicts[number] for number in sorted(wrong[:num_wrong] + right[: most - num_wrong])]


def _tile(verdict: Verdict) -> Image.Image:
    tile = Image.new("RGB", _TILE, "white")
    pen = ImageDraw.Draw(tile)
    pen.rectangle((2, 2, _TILE[0] - 3, _TILE[1] - 3), outline=_RIGHT if verdict.right else _WRONG, width=3)
    room = (_TILE[0] - 12) // max(1, len(verdict.thumbnails))
    for number, thumbnail in enumerate(verdict.thumbnails):
        small = thumbnail.copy()
        small.thumbnail((room - 4, _IMAGES - 8))
        _frame(small, verdict)
        tile.paste(small, (8 + number * room, 8))
    lines = [(line, (0, 0, 0)) for line in textwrap.wrap(verdict.question, _LETTERS)]
    said = "says: " + " ".join(verdict.said.split())
    lines += [(line, _RIGHT if verdict.right else _WRONG) for line in textwrap.wrap(said, _LETTERS)[:4]]
    if not verdict.right:
        lines += [(line, (90, 90, 90)) for line in textwrap.wrap("right: " + verdict.expected, _LETTERS)]
    font = ImageFont.load_default(12)
    for number, (line, colour) in enumerate(lines[:_MOST_LINES]):
        shown = line.replace("｜", "|")  # the font has no full-width bar
        pen.text((8, _IMAGES + 4 + number * _LINE), shown, colour, font)
    return tile


def _frame(image: Image.Image, verdict: Verdict) -> None:
    """Draw the boxes of the answer, and of the right one where they differ."""
    pen = ImageDraw.Draw(image)
    for text, colour in ((verdict.expected, _RIGHT), (verdict.said, _RIGHT if verdict.right else _WRONG)):
        for box in parse_answer(text).boxes:
            (x1, x2), (y1, y2) = sorted(box[::2]), sorted(box[1::2])
            wide, high = (image.width - 1) / 999, (image.height - 1) / 999
            pen.rectangle((x1 * wide, y1 * high, x2 * wide, y2 * high), outline=colour)
