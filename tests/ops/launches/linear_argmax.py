"""The head."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from spyglass.quant.formats import BF16
from spyglass.quant.packed import empty_packed
from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    weight, skip = empty_packed(BF16, (129280, 4096), "meta"), meta(129280, dtype=torch.bool)
    for rows in (1, 128):
        yield Launch(args=(meta(rows, 4096), weight, skip))
