"""The routed experts of V4."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from spyglass.quant.formats import FP4, FakeQuant
from spyglass.quant.packed import empty_packed
from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    stacks = [empty_packed(FP4, (256, *shape), "meta") for shape in ((2048, 4096), (2048, 4096), (4096, 2048))]
    options = {"limit": 10.0, "rounding": FakeQuant(element="e4m3", block=128)}
    for rows in (1, 128, 2048, 8192):
        ids, weights = meta(rows, 6, dtype=torch.int32), meta(rows, 6, dtype=torch.float32)
        yield Launch(args=(meta(rows, 4096), ids, weights, *stacks), options=options)
