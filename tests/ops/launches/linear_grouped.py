"""The output maps of V4's head groups: few rows, tiles, and weights decoded once."""

from __future__ import annotations

from collections.abc import Iterator

from spyglass.quant.formats import fp8
from spyglass.quant.packed import empty_packed
from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    weight = empty_packed(fp8((128, 128)), (8 * 1024, 4096), "meta")
    for rows in (1, 128):
        yield Launch(args=(meta(rows, 8, 4096), weight))
