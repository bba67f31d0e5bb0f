"""Rows of the residual, of the low ranks, and heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from spyglass.quant.formats import FakeQuant
from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    for width in (512, 1024, 1536, 4096, 5120):
        yield Launch(args=(meta(128, width), meta(width, dtype=torch.float32)), options={"eps": 1e-6})
    yield Launch(args=(meta(128, 1152), meta(1152)), options={"eps": 1e-6})
    yield Launch(args=(meta(128, 64, 512), None), options={"eps": 1e-6})
    for width, block in ((1024, 128), (1280, 32)):
        options = {"eps": 1e-6, "quant": FakeQuant(element="e4m3", block=block)}
        yield Launch(args=(meta(128, width), meta(width, dtype=torch.float32)), options=options)


def train() -> None:
    """What a backward launches."""
    from spyglass.ops.rms_norm.triton_training import norm_gradient

    weight = meta(4096, dtype=torch.float32)
    norm_gradient(meta(4096, 4096), weight, meta(4096, 4096), meta(4096, 4096), 1e-6, False)
    norm_gradient(meta(4096, 512), None, meta(4096, 512), meta(4096, 512), 1e-6, True)
