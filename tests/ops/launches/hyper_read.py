"""Streams of V4 and V4.1, few rows and many."""

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
    for rows, width, shifted in ((1, 4096, False), (4096, 4096, False), (128, 5120, True)):
        weights = (meta(*shape, dtype=torch.float32) for shape in ((24, 4 * width), (3,), (24,), (width,)))
        pre = meta(rows, 4, dtype=torch.float32) if shifted else None
        yield Launch(args=(meta(rows, 4, width), *weights), options={**options, "pre_TM": pre})
