"""Rows of a few sequences in shuffled pages of NaN, and where each logical row lies: what ops that read memory get."""

from __future__ import annotations

import numpy as np
import torch

from spyglass.quant.formats import StoredRow
from spyglass.quant.rows import encode_rows


class Paged:
    """`rows[s]` are the logical rows of sequence s; pages that no sequence holds, and rows behind the last, are NaN.

    `first[s]`: logical rows below it are gone and their pages reused, as in a ring.
    """

    def __init__(self, rows: list[torch.Tensor], page_rows: int, first: list[int] | None = None) -> None:
        first = [0] * len(rows) if first is None else first
        starts = [f // page_rows for f in first]
        counts = [-(-len(r) // page_rows) - s for r, s in zip(rows, starts, strict=True)]
        width, shuffle = max(max(counts), 1), np.random.default_rng(len(rows))
        order = shuffle.permutation(len(rows) * width + 3)
        dim, dtype = rows[0].shape[1], rows[0].dtype
        self.pages = torch.full((len(order), page_rows, dim), float("nan")).to(dtype)
        self.table = torch.full((len(rows), width), -1, dtype=torch.int32)
        taken = iter(order.tolist())
        for s, mine in enumerate(rows):
            for logical in range(starts[s], starts[s] + counts[s]):
                page = next(taken)
                self.table[s, logical % width] = page
                part = mine[logical * page_rows : (logical + 1) * page_rows].clone()
                part[: max(0, first[s] - logical * page_rows)] = float("nan")
                self.pages[page, : len(part)] = part


def as_codes(pages: torch.Tensor, format: StoredRow | None) -> torch.Tensor:
    """The same pages as codes of `format` (None: as they are); rows of NaN become bytes of ones."""
    if format is None:
        return pages
    codes = encode_rows(pages, format)
    codes[pages.isnan().all(-1)] = 255
    return codes
