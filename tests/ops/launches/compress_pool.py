"""Groups of 4 with overlap, of 128 and of 2 rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    for width, sources, overlap in ((2048, 8, True), (512, 8, True), (1024, 128, False), (1024, 2, False)):
        rows = meta(128, width, dtype=torch.float32)
        options = {"overlap": overlap, "out_dtype": torch.bfloat16}
        yield Launch(args=(rows, rows, meta(9, sources, dtype=torch.int32)), options=options)
