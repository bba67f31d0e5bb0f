"""Inputs of FP8 and FP4 maps, stored rows, index rows."""

from __future__ import annotations

from collections.abc import Iterator

from spyglass.quant.formats import FakeQuant
from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    for block in (128, 32):
        yield Launch(args=(meta(128, 4096), FakeQuant(element="e4m3", block=block)))
    options = {"dims": 448, "tail_bf16": True}
    yield Launch(args=(meta(128, 512), FakeQuant(element="e4m3", block=64)), options=options)
    yield Launch(args=(meta(128, 512), FakeQuant(element="e2m1", block=16, scale="e4m3")))
    yield Launch(args=(meta(128, 64, 128), FakeQuant(element="e2m1", block=32)))
