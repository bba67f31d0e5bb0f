"""Streams of V4 and V4.1, few rows and many, after attention and after experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from spyglass.quant.formats import FakeQuant
from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    options = {
        "norm_eps": 1e-6,
        "hc_eps": 1e-6,
        "rounds": 20,
        "eps": 1e-6,
        "quant": FakeQuant(element="e4m3", block=128),
    }
    for rows, width, shared in ((1, 4096, False), (12, 4096, True), (4096, 4096, True), (128, 5120, True)):
        weights = (meta(*shape, dtype=torch.float32) for shape in ((24, 4 * width), (3,), (24,), (width,)))
        post, comb = meta(rows, 4, dtype=torch.float32), meta(rows, 4, 4, dtype=torch.float32)
        z = (meta(rows, width, dtype=torch.float32), meta(rows, width)) if shared else (meta(rows, width), None)
        pre = post if width == 5120 else None
        args = (*z, meta(rows, 4, width), post, comb, *weights)
        yield Launch(args=args, options={**options, "pre_TM": pre})
