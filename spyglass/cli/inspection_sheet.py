"""One sheet that shows what a model gets of an image: patches, cells, the order of tokens, who sees whom, counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from spyglass.prompt.tokens import ImagePlan, ImageSpan, TokenKind
from spyglass.prompt.visibility import visible_extra, window_range

Colour = tuple[int, int, int]

_PAPER: Colour = (252, 251, 248)
_INK: Colour = (38, 40, 46)
_FAINT: Colour = (128, 130, 138)
_RULE: Colour = (222, 220, 214)
_TEXT_CELL: Colour = (232, 231, 227)
_CELL_LINE: Colour = (255, 196, 0)
_PATH: Colour = (226, 190, 90)
_KIND_COLOURS: dict[TokenKind, Colour] = {
    TokenKind.TEXT: _TEXT_CELL,
    TokenKind.START: (34, 139, 94),
    TokenKind.PAD: (176, 178, 186),
    TokenKind.IMAGE: (76, 120, 200),
    TokenKind.NEWLINE: (240, 160, 40),
    TokenKind.END: (200, 60, 70),
}
_FIRST: Colour = (24, 52, 122)  # first and last IMAGE token; the ones between are blended
_LAST: Colour = (150, 214, 226)
_UNSEEN: Colour = (245, 244, 240)
_CAUSAL: Colour = (150, 160, 180)
_BOTH_WAYS: Colour = (76, 120, 200)

_WIDTH = 1600
_MARGIN = 48
_GAP = 40
_PANEL = (_WIDTH - 2 * _MARGIN - _GAP) // 2
_TALLEST = 900  # of the two upper panels
_STRIP_COLUMNS = 64  # a multiple of four, so that columns show the position modulo 4
_CONTEXT = 64  # text positions drawn before and after the block
_MASK = 520
_TICK = 64  # left of the mask, for the names of its rows
_LABEL_CELL = 26  # cells smaller than this get no number
_HEAD = 58  # a heading and the line that explains it


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What is drawn: the resized image with its plan, its block, and the facts to print as (name, value)."""

    title: str
    facts: tuple[tuple[str, str], ...]
    resized: Image.Image
    plan: ImagePlan
    span: ImageSpan
    merge: int  # patches per cell side
    max_tokens: int
    window: int
    mutual: bool  # whether a span sees itself both ways


def draw_inspection(inspection: Inspection) -> Image.Image:
    """The sheet, RGB, 1,600 pixels wide and as tall as it must be."""
    panels = (_image_panel(inspection), _order_panel(inspection))
    strip, mask = _strip(inspection), _mask(inspection)
    upper = max(panel.height for panel in panels)
    facts_height = 27 * len(inspection.facts)
    top = 110
    middle = top + _HEAD + upper + _GAP
    lower = middle + _HEAD + 32 + strip.height + _GAP
    sheet = Image.new("RGB", (_WIDTH, lower + _HEAD + max(mask.height + 34, facts_height) + _MARGIN), _PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((_MARGIN, 34), inspection.title, _INK, _font(34))
    pen.line((_MARGIN, 88, _WIDTH - _MARGIN, 88), _RULE, 2)
    left, right = _MARGIN, _MARGIN + _PANEL + _GAP
    merge = inspection.merge
    _heading(
        pen,
        (left, top),
        "Patches and cells",
        f"thin lines: patches, what the tower looks at; yellow: cells of {merge} x {merge} patches, a token each; "
        "grey: filled up",
    )
    sheet.paste(panels[0], (left, top + _HEAD))
    _heading(pen, (right, top), "Order of tokens", "the turn at which each cell enters the prompt; orange: line ends")
    sheet.paste(panels[1], (right, top + _HEAD))
    _heading(
        pen,
        (left, middle),
        "Token block",
        f"positions of the prompt, {_STRIP_COLUMNS} to a row: the image's tokens, coloured as above, between text",
    )
    _legend(pen, left, middle + _HEAD, inspection)
    sheet.paste(strip, (left, middle + _HEAD + 32))
    _heading(
        pen,
        (left, lower),
        "Who sees whom in the window",
        "each row is a token that looks, each column one that it may see; both run through the block above",
    )
    sheet.paste(mask, (left, lower + _HEAD))
    _mask_legend(pen, left + _TICK, lower + _HEAD + 8 + mask.height, inspection.mutual)
    _heading(pen, (right, lower), "Counts", "")
    _facts(pen, right, lower + _HEAD - 24, inspection.facts)
    return sheet


def _heading(pen: ImageDraw.ImageDraw, at: tuple[int, int], title: str, explanation: str) -> None:
    pen.text(at, title, _INK, _font(20))
    pen.text((at[0], at[1] + 29), explanation, _FAINT, _font(14))


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _grid_scale(inspection: Inspection, rows: int, columns: int) -> float:
    """Pixels per cell at which `rows` x `columns` cells fit a panel."""
    cell = inspection.merge * inspection.plan.patch_size
    return min(_PANEL / columns, _TALLEST / rows, 2.0 * cell)


def _image_panel(inspection: Inspection) -> Image.Image:
    """The resized image under its patch grid (thin) and cell grid (thick); cells beyond its edge are zero-padding."""
    plan = inspection.plan
    rows, columns = plan.llm_grid
    cell = _grid_scale(inspection, rows, columns)
    patch = cell / inspection.merge
    size = (max(1, round(cell * columns)), max(1, round(cell * rows)))
    shown = (max(1, round(patch * plan.vit_grid[1])), max(1, round(patch * plan.vit_grid[0])))
    panel = Image.new("RGB", (size[0] + 1, size[1] + 1), _TEXT_CELL)
    panel.paste(inspection.resized.resize(shown, Image.Resampling.LANCZOS), (0, 0))
    veil = Image.new("RGBA", panel.size)
    pen = ImageDraw.Draw(veil)
    if patch >= 3:
        _lines(pen, patch, plan.vit_grid, shown, (255, 255, 255, 60), 1)
    _lines(pen, cell, (rows, columns), size, (*_CELL_LINE, 220 if cell >= _LABEL_CELL else 150), 1)
    return Image.alpha_composite(panel.convert("RGBA"), veil).convert("RGB")


def _lines(
    pen: ImageDraw.ImageDraw,
    step: float,
    grid: tuple[int, int],
    size: tuple[int, int],
    colour: tuple[int, int, int, int],
    width: int,
) -> None:
    for row in range(grid[0] + 1):
        pen.line((0, round(row * step), size[0], round(row * step)), colour, width)
    for column in range(grid[1] + 1):
        pen.line((round(column * step), 0, round(column * step), size[1]), colour, width)


def _order_panel(inspection: Inspection) -> Image.Image:
    """Cells coloured and numbered (or joined) by their turn in the block; newlines stand at the right."""
    rows, columns = inspection.plan.llm_grid
    cell = _grid_scale(inspection, rows, columns + 1)
    panel = Image.new("RGB", (round(cell * (columns + 1)) + 1, round(cell * rows) + 1), _PAPER)
    pen = ImageDraw.Draw(panel)
    font = _font(max(9, min(15, int(cell * 0.36))))
    colour_of = _blend(len(inspection.span.order))
    centres = []
    for turn, index in enumerate(inspection.span.order.tolist()):
        row, column = divmod(index, columns)
        _box(pen, column * cell, row * cell, cell, colour_of(turn))
        centres.append(((column + 0.5) * cell, (row + 0.5) * cell))
    for row in range(rows):
        _box(pen, columns * cell, row * cell, cell, _KIND_COLOURS[TokenKind.NEWLINE])
    if cell < _LABEL_CELL:
        for here, there in itertools.pairwise(centres):
            if abs(there[0] - here[0]) < 1.5 * cell:  # the jump back to the left is not drawn
                pen.line((*here, *there), _PATH, 1)
    else:
        for turn, (x, y) in enumerate(centres):
            dark = turn < len(centres) * 0.55
            pen.text((x, y), str(turn), (255, 255, 255) if dark else _INK, font, anchor="mm")
    return panel


def _blend(count: int) -> Callable[[int], Colour]:
    first, last = np.array(_FIRST), np.array(_LAST)

    def colour_of(turn: int) -> Colour:
        red, green, blue = (first + (last - first) * (turn / max(1, count - 1))).astype(int).tolist()
        return red, green, blue

    return colour_of


def _box(pen: ImageDraw.ImageDraw, x: float, y: float, side: float, colour: Colour) -> None:
    inset = 1 if side >= 8 else 0
    pen.rectangle((round(x), round(y), round(x + side) - inset - 1, round(y + side) - inset - 1), colour)


def _context(inspection: Inspection) -> tuple[int, NDArray[np.int8]]:
    """First position drawn and the kinds from there on, with text around the block."""
    span = inspection.span
    first = max(0, span.start - _CONTEXT) // 4 * 4
    text = np.full(span.start - first, TokenKind.TEXT, np.int8)
    return first, np.concatenate([text, span.kinds, np.full(_CONTEXT, TokenKind.TEXT, np.int8)])


def _strip(inspection: Inspection) -> Image.Image:
    """Every position of the block as a square, 64 to a row; wider gaps show the groups of four."""
    first, kinds = _context(inspection)
    margin = 64
    pitch = (_WIDTH - 2 * _MARGIN - margin) / (_STRIP_COLUMNS + _STRIP_COLUMNS / 4 * 0.3)
    rows = -(-len(kinds) // _STRIP_COLUMNS)
    strip = Image.new("RGB", (_WIDTH - 2 * _MARGIN, round(rows * pitch) + 4), _PAPER)
    pen = ImageDraw.Draw(strip)
    colour_of = _blend(len(inspection.span.order))
    turn = 0
    for index, value in enumerate(kinds.tolist()):
        row, column = divmod(index, _STRIP_COLUMNS)
        if column == 0:
            pen.text((0, row * pitch + pitch / 2), str(first + index), _FAINT, _font(13), anchor="lm")
        colour = _KIND_COLOURS[TokenKind(value)]
        if value == TokenKind.IMAGE:
            colour, turn = colour_of(turn), turn + 1
        _box(pen, margin + (column + column // 4 * 0.3) * pitch, row * pitch, pitch - 1, colour)
    return strip


def _legend(pen: ImageDraw.ImageDraw, x: int, y: int, inspection: Inspection) -> None:
    for kind in TokenKind:
        count = int((inspection.span.kinds == kind).sum())
        if kind is not TokenKind.TEXT and not count:
            continue
        label = "text" if kind is TokenKind.TEXT else f"{kind.name} {count}"
        pen.rectangle((x, y + 2, x + 14, y + 16), _KIND_COLOURS[kind])
        pen.text((x + 22, y), label, _INK, _font(15))
        x += 52 + round(pen.textlength(label, _font(15)))


def _mask(inspection: Inspection) -> Image.Image:
    """Queries down, keys across: the causal window, and what a span sees beyond it; text around the block."""
    _, kinds = _context(inspection)
    none = np.zeros((len(kinds), 2), np.int32)
    extra = visible_extra(kinds, inspection.max_tokens) if inspection.mutual else none
    key_T = np.arange(len(kinds))

    def seen(visible_T2: NDArray[np.int32]) -> NDArray[np.bool_]:
        low_T, high_T = window_range(visible_T2, inspection.window)
        return np.asarray((key_T >= low_T[:, None]) & (key_T <= high_T[:, None]))

    pixels = np.full((len(kinds), len(kinds), 3), _UNSEEN, np.uint8)
    pixels[seen(extra)] = _BOTH_WAYS
    pixels[seen(none)] = _CAUSAL
    panel = Image.new("RGB", (_TICK + _MASK + 1, _MASK + 1), _PAPER)
    panel.paste(Image.fromarray(pixels).resize((_MASK, _MASK), Image.Resampling.BOX), (_TICK, 0))
    pen = ImageDraw.Draw(panel)
    pen.rectangle((_TICK, 0, _TICK + _MASK, _MASK), outline=_RULE)
    for kind in (TokenKind.START, TokenKind.END):
        y = round((int(np.flatnonzero(kinds == kind)[0]) + 0.5) * _MASK / len(kinds))
        pen.line((_TICK - 8, y, _TICK, y), _KIND_COLOURS[kind], 2)
        pen.text((_TICK - 12, y), kind.name, _KIND_COLOURS[kind], _font(13), anchor="rm")
    return panel


def _mask_legend(pen: ImageDraw.ImageDraw, x: int, y: int, mutual: bool) -> None:
    entries = [
        ("what came before, within the window", _CAUSAL),
        ("also seen inside an image", _BOTH_WAYS),
        ("unseen", _UNSEEN),
    ]
    for label, colour in entries if mutual else [entries[0], entries[2]]:
        pen.rectangle((x, y + 2, x + 14, y + 16), colour, _FAINT)
        pen.text((x + 22, y), label, _INK, _font(15))
        x += 52 + round(pen.textlength(label, _font(15)))


def _facts(pen: ImageDraw.ImageDraw, x: int, y: int, facts: tuple[tuple[str, str], ...]) -> None:
    for name, value in facts:
        pen.text((x, y), name, _FAINT, _font(17))
        pen.text((x + 190, y), value, _INK, _font(17))
        y += 27
