"""The V4.1 span of an image: reading order, no pads, the same at every prompt position (spec v41 7.2).

`START, (IMAGE * columns, NEWLINE) * rows, END`. V4.1 has no learned pad vector and numbers its roles without PAD;
here the roles keep the numbers of `TokenKind`.
"""

from __future__ import annotations

import numpy as np

from spyglass.prompt.tokens import ImagePlan, ImageSpan, TokenKind


def num_tokens(rows: int, columns: int) -> int:
    """Tokens of a span of `rows` x `columns` cells, START and END included."""
    return rows * (columns + 1) + 2


def layout(plan: ImagePlan, start: int, image: int = 0) -> ImageSpan:
    """Span of `plan` at prompt position `start`; `image` is the image's number."""
    rows, columns = plan.llm_grid
    body = np.full((rows, columns + 1), TokenKind.IMAGE, np.int8)
    body[:, columns] = TokenKind.NEWLINE
    kinds = np.concatenate([[TokenKind.START], body.reshape(-1), [TokenKind.END]]).astype(np.int8)
    return ImageSpan(image=image, start=start, lead=0, kinds=kinds, order=np.arange(rows * columns, dtype=np.int32))
