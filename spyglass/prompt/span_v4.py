"""The V4 token block of an image: rows in pairs, column by column, aligned to the groups of four tokens that ratio-4
layers pool (spec v4 9.5, 6.3).

`PAD * (3 - start % 4), START, pairs of rows (an odd count gets a row of PADs), two PADs if a half group is left over,
END`: START is the last token of its group of four, cells fill whole groups, so that one pooled row is a 2 x 2 patch
of cells.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spyglass.prompt.tokens import ImagePlan, ImageSpan, TokenKind

GROUP = 4
MAX_LEAD = GROUP - 1


def num_tokens(rows: int, columns: int) -> int:
    """Tokens of a block of `rows` x `columns` cells, START and END included, leading pads not."""
    even_rows = rows + rows % 2
    body = even_rows * (columns + 1)
    return body + body // 2 % 2 * 2 + 2


def lead_pads(start: int) -> int:
    """PADs before START when the block begins at prompt position `start`, so that START stands at 3 modulo 4."""
    return MAX_LEAD - start % GROUP


def layout(plan: ImagePlan, start: int, image: int = 0) -> ImageSpan:
    """Token block of `plan` at prompt position `start`, leading pads included; `image` is the image's number."""
    rows, columns = plan.llm_grid
    kinds = np.full((rows + rows % 2, columns + 1), TokenKind.PAD, np.int8)
    kinds[:rows, :columns] = TokenKind.IMAGE
    kinds[:rows, columns] = TokenKind.NEWLINE
    cells = np.full(kinds.shape, -1, np.int32)
    cells[:rows, :columns] = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)

    body, order = _by_pairs(kinds), _by_pairs(cells)
    lead = lead_pads(start)
    spare = body.size // 2 % 2 * 2
    block = np.concatenate(
        [
            np.full(lead, TokenKind.PAD, np.int8),
            np.array([TokenKind.START], np.int8),
            body,
            np.full(spare, TokenKind.PAD, np.int8),
            np.array([TokenKind.END], np.int8),
        ]
    )
    return ImageSpan(image=image, start=start, lead=lead, kinds=block, order=order[order >= 0])


def _by_pairs(grid: NDArray[Any]) -> NDArray[Any]:
    """Rows 2i and 2i + 1 together, column by column."""
    rows, columns = grid.shape
    return grid.reshape(rows // 2, 2, columns).transpose(0, 2, 1).reshape(-1)
