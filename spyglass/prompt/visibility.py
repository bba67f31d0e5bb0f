"""Who sees whom beyond the causal window, and where a prompt may be cut (spec v4 6.1, 6.4).

Positions of one span START..END see each other both ways; leading pads stand outside and behave like text. V4.1 has
no such rule: every position is causal (spec v41 7.3).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spyglass.prompt.tokens import Prompt, TokenKind


def visible_extra(kinds_T: NDArray[np.int8], max_tokens: int) -> NDArray[np.int32]:
    """Extra keys visible to the left and right of each position, int32 [T, 2], in the reference's form.

    (i - START, END - i) inside a span, capped at (max_tokens - 1, max_tokens); (0, 0) elsewhere. A span ends at the
    first END after its START, a stray END is ignored, an unclosed START reaches to the last position.
    """
    total = len(kinds_T)
    position_T = np.arange(total)
    start_T = np.maximum.accumulate(np.where(kinds_T == TokenKind.START, position_T, -1))
    ends = np.flatnonzero(kinds_T == TokenKind.END)
    first_end_T = np.append(ends, total - 1)[np.searchsorted(ends, np.maximum(start_T, 0))]
    inside_T = (start_T >= 0) & (position_T <= first_end_T)
    left_T = np.minimum(position_T - start_T, max_tokens - 1)
    right_T = np.minimum(first_end_T - position_T, max_tokens)
    return np.where(inside_T[:, None], np.stack([left_T, right_T], axis=1), 0).astype(np.int32)


def window_range(visible_T2: NDArray[np.int32], window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and last raw key each position sees (both inclusive), int64 [T] each; `window` counts the query itself.

    lo = max(0, i - (W - 1) - max(left - (W - 1), 0)), hi = i + right (spec v4 6.1).
    """
    position_T = np.arange(len(visible_T2), dtype=np.int64)
    left_T, right_T = visible_T2[:, 0], visible_T2[:, 1]
    reach = window - 1
    return np.maximum(position_T - reach - np.maximum(left_T - reach, 0), 0), position_T + right_T


def legal_cuts(prompt: Prompt) -> NDArray[np.bool_]:
    """Which cuts 0..T leave every span in one piece, bool [T + 1]; a cut c stands before position c.

    A cut is illegal where a position before it sees one behind it: START < c <= END of a V4 span. All cuts of a V4.1
    prompt are legal.
    """
    cuts = np.ones(len(prompt) + 1, np.bool_)
    cuts[1:] = prompt.visible_T2[:, 1] == 0
    return cuts
