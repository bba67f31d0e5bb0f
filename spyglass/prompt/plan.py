"""How large an image is made and how many tokens it costs, from its width and height alone (spec v4 9.1, v41 7.1).

An image is scaled up to a least number of pixels, rounded up to whole patches, and, where its token block would be
too long, shrunk to the largest grid whose block fits. All arithmetic follows the reference's Python operation by
operation: truncation, ceiling and float64 order decide grids at the edges. The reference's rule is applied once for
V4.1 (the makers' Rust package repeats it until the size stands still, and differs for about 2 % of random sizes).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

from spyglass.config.model import VisionConfig
from spyglass.errors import ConfigError, PromptError
from spyglass.prompt import span_v4, span_v41
from spyglass.prompt.tokens import ImagePlan, ImageSpan

_DELIMITERS = 2  # START and END


@dataclass(frozen=True, slots=True)
class _Rule:
    """What the two layouts do differently: token formula, block, share of the cap, solver for blocks over the cap."""

    num_tokens: Callable[[int, int], int]
    layout: Callable[[ImagePlan, int, int], ImageSpan]
    reserve: int  # tokens of the cap that leading pads may take
    fit: Callable[[float, float, int, int, int], tuple[int, int]]


def plan_image(width: int, height: int, vision: VisionConfig) -> ImagePlan:
    """Plan an image of `width` x `height` pixels.

    Raises:
        PromptError: a side is not a positive integer, or the image is so thin that nothing of it would be left.
        ConfigError: `vision.max_tokens` is too small for any image.
    """
    width, height = _checked_side(width, "width"), _checked_side(height, "height")
    patch, cell = vision.patch_size, vision.patch_size * vision.downsample_ratio
    rule = _RULES[vision.layout]
    budget = vision.max_tokens - rule.reserve
    w, h = _sizing_dimensions(width, height, vision)
    box = (math.ceil(w / patch) * patch, math.ceil(h / patch) * patch)
    cap = budget
    while rule.num_tokens(*_cells(box, vision)) > cap:
        if budget < rule.num_tokens(1, 1):
            raise ConfigError(
                f"no image fits into {vision.max_tokens} tokens; raise the vision token limit of the config"
            )
        box = rule.fit(w, h, budget, patch, cell)
        budget -= 1
    stretch = vision.max_wh_ratio is not None and width >= height * vision.max_wh_ratio
    if not stretch and 0 in contained_size((width, height), box):
        raise PromptError(
            f"an image of {width}x{height} pixels is too thin: scaled into {box[0]}x{box[1]} one side rounds to 0; "
            "crop it or make it thicker"
        )
    rows, columns = _cells(box, vision)
    return ImagePlan(
        resized=box,
        vit_grid=(box[1] // patch, box[0] // patch),
        llm_grid=(rows, columns),
        num_tokens=rule.num_tokens(rows, columns),
        stretch=stretch,
        patch_size=patch,
    )


def plan_patches(vit_grid: tuple[int, int], vision: VisionConfig) -> ImagePlan:
    """Plan of an image that is already cut into `vit_grid` (rows, columns) patches; below the planner's minimum is
    fine.

    Raises:
        PromptError: the grid is empty or its block is longer than the model takes.
    """
    rows, columns = _checked_side(vit_grid[0], "patch rows"), _checked_side(vit_grid[1], "patch columns")
    rule = _RULES[vision.layout]
    box = (columns * vision.patch_size, rows * vision.patch_size)
    cells = _cells(box, vision)
    count, cap = rule.num_tokens(*cells), vision.max_tokens - rule.reserve
    if count > cap:
        raise PromptError(
            f"a grid of {rows}x{columns} patches needs {count} tokens, the limit is {cap}; use a smaller grid"
        )
    return ImagePlan(
        resized=box,
        vit_grid=(rows, columns),
        llm_grid=cells,
        num_tokens=count,
        stretch=False,
        patch_size=vision.patch_size,
    )


def layout_block(plan: ImagePlan, start: int, vision: VisionConfig, image: int = 0) -> ImageSpan:
    """Token block of image number `image` at prompt position `start`, in the layout of `vision`."""
    return _RULES[vision.layout].layout(plan, start, image)


def contained_size(size: tuple[int, int], box: tuple[int, int]) -> tuple[int, int]:
    """Largest (width, height) of the aspect of `size` inside `box`, as Pillow's `ImageOps.contain` computes it."""
    (width, height), (box_width, box_height) = size, box
    aspect, box_aspect = width / height, box_width / box_height
    if aspect > box_aspect:
        return box_width, round(height / width * box_width)
    if aspect < box_aspect:
        return round(width / height * box_height), box_height
    return box


def _checked_side(value: int, name: str) -> int:
    try:
        side = operator.index(value)
    except TypeError:
        raise PromptError(f"{name} must be an integer, not {value!r}") from None
    if not 0 < side <= _LONGEST_SIDE:
        raise PromptError(f"{name} must be between 1 and {_LONGEST_SIDE} pixels, not {side}")
    return side


_LONGEST_SIDE = 2**31 - 1  # what image files and Pillow can express


def _sizing_dimensions(width: int, height: int, vision: VisionConfig) -> tuple[float, float]:
    """Steps 1 and 2: clamp wide images, scale small ones up, truncating."""
    w: float = width
    h: float = height
    if vision.max_wh_ratio is not None and w > h * vision.max_wh_ratio:
        w = h * vision.max_wh_ratio
    if 0 < w * h < vision.min_pixels:
        scale = math.sqrt(vision.min_pixels / (w * h))
        w, h = int(w * scale), int(h * scale)
    return w, h


def _cells(box: tuple[int, int], vision: VisionConfig) -> tuple[int, int]:
    """Rows and columns of aligner cells of a resized image (width, height)."""
    width, height = box
    merge, patch = vision.downsample_ratio, vision.patch_size
    return -(-(height // patch) // merge), -(-(width // patch) // merge)


def _fit_paired(w: float, h: float, budget: int, patch: int, cell: int) -> tuple[int, int]:
    """Largest (width, height) of the aspect of w x h whose cells fill an even number of rows within `budget` tokens."""
    aspect = h / w
    columns = math.sqrt((budget - _DELIMITERS) / aspect + 0.25) - 0.5
    rows = columns * aspect
    if columns < 1:
        return cell, _even((budget - _DELIMITERS) // 2) * cell
    if rows < 2:
        return ((budget - _DELIMITERS) // 2 - 1) * cell, 2 * cell
    scale = min(math.floor(columns) * cell / w, _even(math.floor(rows)) * cell / h)
    return math.floor(w * scale / patch) * patch, math.floor(h * scale / patch) * patch


def _fit_reading(w: float, h: float, budget: int, patch: int, cell: int) -> tuple[int, int]:
    """Largest (width, height) of the aspect of w x h whose rows of cells and newlines stay within `budget` tokens."""
    aspect = h / w
    columns = math.sqrt((budget - _DELIMITERS) / aspect + 0.25) - 0.5
    rows = columns * aspect
    if columns < 1:
        return cell, (budget - _DELIMITERS) // 2 * cell
    if rows < 1:
        return (budget - _DELIMITERS - 1) * cell, cell
    scale = min(math.floor(columns) * cell / w, math.floor(rows) * cell / h)
    return math.floor(w * scale / patch) * patch, math.floor(h * scale / patch) * patch


def _even(count: int) -> int:
    return count - count % 2


_RULES = {
    "paired": _Rule(num_tokens=span_v4.num_tokens, layout=span_v4.layout, reserve=span_v4.MAX_LEAD, fit=_fit_paired),
    "reading": _Rule(num_tokens=span_v41.num_tokens, layout=span_v41.layout, reserve=0, fit=_fit_reading),
}
