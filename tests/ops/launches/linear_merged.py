"""The maps of the normed input of a V4 layer of ratio 4, and the first two of a shared expert."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from spyglass.ops.linear_merged.reference import MapStack
from spyglass.quant.formats import BF16, FakeQuant, Format, fp8
from spyglass.quant.packed import empty_packed
from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    maps = _stack(fp8((128, 128)), (512, 1024), torch.bfloat16)
    pools = _stack(BF16, (1024, 1024, 256, 256), torch.float32)
    weights = _stack(BF16, (64,), torch.bfloat16)
    for rows in (1, 16, 32, 128):
        yield Launch(args=(meta(rows, 4096), (maps, pools, weights)), options={"rounded_TI": meta(rows, 4096)})
        yield Launch(args=(meta(rows, 4096), (_stack(fp8((128, 128)), (2048, 2048), torch.bfloat16),)))


def _stack(format: Format, sizes: tuple[int, ...], dtype: torch.dtype) -> MapStack:
    rounding = FakeQuant(element="e4m3", block=128) if format.name == "fp8" else None
    weight = empty_packed(format, (sum(sizes), 4096), "meta")
    return MapStack(weight=weight, sizes=sizes, rounding=rounding, out_dtype=dtype)
