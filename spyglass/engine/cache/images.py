"""Rows of images that have been encoded before: by pixels, plan and image adapter, never by name or position."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

Key = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCounts:
    """Since the start: images asked for, those that were found and those that had to go; `bytes_held` now."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0
    bytes_held: int = 0


class ImageCache:
    """Aligner rows [I, C] by (digest of pixels and plan, digest of the image adapter), at most `limit_bytes` of them.

    Least recently used ones go first; 0 bytes keep none.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._rows: OrderedDict[Key, torch.Tensor] = OrderedDict()
        self._bytes = self._queries = self._hits = self._evictions = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def counts(self) -> ImageCounts:
        """Counters and what is held now."""
        return ImageCounts(queries=self._queries, hits=self._hits, evictions=self._evictions, bytes_held=self._bytes)

    def get(self, key: Key) -> torch.Tensor | None:
        self._queries += 1
        rows_IC = self._rows.get(key)
        if rows_IC is not None:
            self._hits += 1
            self._rows.move_to_end(key)
        return rows_IC

    def put(self, key: Key, rows_IC: torch.Tensor) -> None:
        """Keep the rows of an image that `get` did not find. They are copied if they are part of a larger tensor."""
        if rows_IC.nbytes > self._limit:
            return
        self._rows[key] = rows_IC.clone()
        self._bytes += rows_IC.nbytes
        while self._bytes > self._limit:
            _, oldest = self._rows.popitem(last=False)
            self._bytes -= oldest.nbytes
            self._evictions += 1

    def clear(self) -> None:
        self._rows.clear()
        self._bytes = 0
