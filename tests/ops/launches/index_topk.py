"""Decoding and prefill at a short and at the longest context; 64 heads (V4) and 32 with candidates (V4.1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from spyglass.quant.formats import FakeQuant, StoredRow
from tests.ops.triton_lane import CODES, Launch, meta

KEYS = StoredRow(quant=FakeQuant(element="e2m1", block=32), dim=128, dims=128)


def launches() -> Iterator[Launch]:
    for rows, entries, stepwise in ((1, 1024, True), (4096, 8192, True), (8, 262144, True), (8, 32768, False)):
        options: dict[str, Any] = {"k": 512, "max_visible": entries, "stepwise": stepwise}
        yield Launch(args=inputs(rows, 64), options=options)
    for rows in (1, 4096):
        options = {"k": 512, "max_visible": 8192, "stepwise": True, "key_format": KEYS}
        yield Launch(args=inputs(rows, 64, KEYS), options=options)
    options = {"k": 512, "max_visible": 131072, "stepwise": True, "block_size": 8}
    yield Launch(args=inputs(8, 32), options={**options, "blocks_TY": meta(8, 2048, dtype=torch.int32)})


def inputs(rows: int, heads: int, format: StoredRow | None = None) -> tuple[torch.Tensor, ...]:
    """Queries, weights, keys, table, sequences and visible entries."""
    lists = meta(rows, 16, dtype=torch.int32), meta(rows, dtype=torch.int32), meta(rows, dtype=torch.int32)
    keys = meta(99, 64, 128) if format is None else meta(99, 64, format.row_bytes, dtype=CODES)
    return meta(rows, heads, 128), meta(rows, heads), keys, *lists
