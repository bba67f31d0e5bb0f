"""Streams of V4 and V4.1, few rows and many."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    options = {"norm_eps": 1e-6, "hc_eps": 1e-6, "rounds": 20}
    for rows, width in ((1, 4096), (4096, 4096), (128, 5120)):
        weights = (meta(*shape, dtype=torch.float32) for shape in ((24, 4 * width), (3,), (24,)))
        yield Launch(args=(meta(rows, 4, width), *weights), options=options)
