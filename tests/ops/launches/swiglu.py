"""Shared expert of V4 and V4.1."""

from __future__ import annotations

from collections.abc import Iterator

from spyglass.quant.formats import FakeQuant
from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    for quant in (None, FakeQuant(element="e4m3", block=128)):
        yield Launch(args=(meta(128, 2048), meta(128, 2048)), options={"limit": 10.0, "quant": quant})
