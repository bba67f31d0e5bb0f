"""Rows of the residual, of the low ranks, and heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    for width in (512, 1024, 1536, 4096, 5120):
        yield Launch(args=(meta(128, width), meta(width, dtype=torch.float32)), options={"eps": 1e-6})
    yield Launch(args=(meta(128, 1152), meta(1152)), options={"eps": 1e-6})
    yield Launch(args=(meta(128, 64, 512), None), options={"eps": 1e-6})
