"""Decoding and prefill of both families: with top-k indices, with all compressed rows, with the window alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from spyglass.ops.sparse_attention.reference import Turn
from tests.ops.triton_lane import GENERATIONS, Launch, meta


def launches() -> Iterator[Launch]:
    for rows in (1, 8, 32, 4096):
        for page, topk in ((64, 512), (4, 0), (0, 0)):
            if page == 0 and rows in (8, 32):
                continue
            yield Launch(args=_window(rows, torch.bfloat16), options=_pool(rows, page, topk), may_spill=GENERATIONS)
    yield Launch(args=_window(1, torch.float32), options=_pool(1, 64, 512, torch.float32), may_spill=GENERATIONS)


def _window(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    lists = [meta(rows, dtype=torch.int32) for _ in range(3)]
    table = meta(rows, 3, dtype=torch.int32)
    return (
        meta(rows, 64, 512, dtype=dtype),
        meta(99, 64, 512, dtype=dtype),
        table,
        *lists,
        meta(64, dtype=torch.float32),
    )


def _turn(rows: int) -> Turn:
    tables = [meta(rows, 32, dtype=torch.float32) for _ in range(2)]
    return Turn(cos_TR=tables[0], sin_TR=tables[1], eps=1e-6, stepwise=True)


def _pool(rows: int, page: int, topk: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    options: dict[str, Any] = {"scale": 512**-0.5, "window_width": 128, "turn": _turn(rows)}
    if page:
        visible, table = meta(rows, dtype=torch.int32), meta(rows, 16, dtype=torch.int32)
        options |= {"pool_NBD": meta(99, page, 512, dtype=dtype), "pool_table_SP": table, "visible_T": visible}
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
