"""Query heads, window rows of V4 and V4.1, index queries and keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from spyglass.quant.formats import FakeQuant
from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    tables = meta(128, 32, dtype=torch.float32), meta(128, 32, dtype=torch.float32)
    norm = {"weight_D": meta(512, dtype=torch.float32), "eps": 1e-6}
    pages = {"pages_NBD": meta(9, 64, 512), "write_T": meta(128, dtype=torch.int64)}
    yield Launch(args=(meta(128, 64, 512), *tables), options={"eps": 1e-6, "stepwise": True})
    fp8 = {"quant": FakeQuant(element="e4m3", block=64), "dims": 448, "tail_bf16": True}
    yield Launch(args=(meta(128, 512), *tables), options={**norm, **fp8, **pages})
    fp4 = {"quant": FakeQuant(element="e2m1", block=16, scale="e4m3")}
    yield Launch(args=(meta(128, 512), *tables), options={**norm, **fp4, **pages})
    index = {"hadamard": True, "quant": FakeQuant(element="e2m1", block=32)}
    yield Launch(args=(meta(128, 64, 128), *tables), options=index)
    weight, keys = meta(128, dtype=torch.float32), {"pages_NBD": meta(9, 64, 128), "write_T": pages["write_T"]}
    yield Launch(args=(meta(128, 128), *tables), options={**index, **keys, "weight_D": weight, "eps": 1e-6})


def train() -> None:
    """What a backward launches."""
    from spyglass.ops.row_finish.triton_training import finish_gradient

    tables = meta(128, 32, dtype=torch.float32), meta(128, 32, dtype=torch.float32)
    for heads, dim, norm, hadamard in ((64, 512, True, False), (1, 512, True, False), (64, 128, False, True)):
        x = meta(128, heads, dim)
        weight = meta(dim, dtype=torch.float32) if heads == 1 else None
        eps = 1e-6 if norm else None
        finish_gradient(x, *tables, x, x, weight_D=weight, eps=eps, stepwise=heads == 64, hadamard=hadamard)
