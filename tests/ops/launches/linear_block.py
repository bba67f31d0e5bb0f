"""The maps of V4: few rows, tiles, and weights decoded once."""

from __future__ import annotations

from collections.abc import Iterator

from spyglass.quant.formats import BF16, FakeQuant, fp8
from spyglass.quant.packed import empty_packed
from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    options = {"rounding": FakeQuant(element="e4m3", block=128)}
    for rows in (1, 32, 128, 4096):
        for shape in ((32768, 1024), (4096, 8192)):
            weight = empty_packed(fp8((128, 128)), shape, "meta")
            yield Launch(args=(meta(rows, shape[1]), weight), options=options)
    yield Launch(args=(meta(8, 4096), empty_packed(BF16, (2048, 4096), "meta")))
