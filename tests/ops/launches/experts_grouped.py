"""The routed experts of V4, tiled as they are on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from spyglass.quant.formats import FP4, FakeQuant
from spyglass.quant.packed import empty_packed
from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    shapes = ((2048, 4096), (2048, 4096), (4096, 2048))
    stacks = [replace(empty_packed(FP4, (256, *shape), "meta"), tiled=True) for shape in shapes]
    options = {"limit": 10.0, "rounding": FakeQuant(element="e4m3", block=128)}
    for rows in (1, 8, 32, 128, 2048):
        ids, weights = meta(rows, 6, dtype=torch.int32), meta(rows, 6, dtype=torch.float32)
        yield Launch(args=(meta(rows, 4096), ids, weights, *stacks), options=options)
