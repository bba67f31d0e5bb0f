"""Decoding and prefill of both families: with top-k indices, with all compressed rows, with the window alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from spyglass.ops.sparse_attention.reference import Turn
from spyglass.quant.formats import FakeQuant, StoredRow
from tests.ops.triton_lane import CODES, GENERATIONS, Launch, meta

V4 = StoredRow(quant=FakeQuant(element="e4m3", block=64), dim=512, dims=448)
V41 = StoredRow(quant=FakeQuant(element="e4m3", block=32), dim=512, dims=512)
V41_POOL = StoredRow(quant=FakeQuant(element="e2m1", block=16, scale="e4m3"), dim=512, dims=512)


def launches() -> Iterator[Launch]:
    for rows in (1, 8, 32, 4096):
        for page, topk in ((64, 512), (4, 0), (0, 0)):
            if page == 0 and rows in (8, 32):
                continue
            yield Launch(args=_window(rows, torch.bfloat16), options=_pool(rows, page, topk), may_spill=GENERATIONS)
    yield Launch(args=_window(1, torch.float32), options=_pool(1, 64, 512, torch.float32), may_spill=GENERATIONS)
    for rows in (1, 8, 32, 4096):  # memory of codes: V4, its layers without compressed rows, V4.1
        for near, far, page in ((V4, V4, 64), (V4, None, 0), (V41, V41_POOL, 64)):
            if page == 0 and rows in (8, 32):
                continue
            options = _pool(rows, page, 512 if page else 0, far=far) | {"window_format": near, "pool_format": far}
            yield Launch(args=_window(rows, torch.bfloat16, near), options=options, may_spill=GENERATIONS)


def _pages(count: int, page: int, dtype: torch.dtype, format: StoredRow | None) -> torch.Tensor:
    return meta(count, page, 512, dtype=dtype) if format is None else meta(count, page, format.row_bytes, dtype=CODES)


def _window(rows: int, dtype: torch.dtype, format: StoredRow | None = None) -> tuple[torch.Tensor, ...]:
    lists = [meta(rows, dtype=torch.int32) for _ in range(3)]
    table = meta(rows, 3, dtype=torch.int32)
    return (
        meta(rows, 64, 512, dtype=dtype),
        _pages(99, 64, dtype, format),
        table,
        *lists,
        meta(64, dtype=torch.float32),
    )


def _turn(rows: int) -> Turn:
    tables = [meta(rows, 32, dtype=torch.float32) for _ in range(2)]
    return Turn(cos_TR=tables[0], sin_TR=tables[1], eps=1e-6, stepwise=True)


def _pool(
    rows: int, page: int, topk: int, dtype: torch.dtype = torch.bfloat16, far: StoredRow | None = None
) -> dict[str, Any]:
    options: dict[str, Any] = {"scale": 512**-0.5, "window_width": 128, "turn": _turn(rows)}
    if page:
        visible, table = meta(rows, dtype=torch.int32), meta(rows, 16, dtype=torch.int32)
        options |= {"pool_NBD": _pages(99, page, dtype, far), "pool_table_SP": table, "visible_T": visible}
        options["pool_width"] = topk or 1024
    if topk:
        options["topk_indices_TX"] = meta(rows, topk, dtype=torch.int32)
    return options


def train() -> None:
    """What a backward launches between its products, for few keys and many."""
    from spyglass.ops.sparse_attention.triton_training import softmax_gradient

    for keys in (192, 320, 1400, 4000):
        products = meta(2, 2 * 64 * 64, keys, dtype=torch.float32)
        softmax_gradient(
            products, meta(2, 64, keys, dtype=torch.bool), meta(64, dtype=torch.float32), 0.04, meta(*products.shape)
        )
