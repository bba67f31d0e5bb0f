"""Rows of windows, pools, index keys and carried state."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    for width, dtype in ((512, torch.bfloat16), (128, torch.bfloat16), (2048, torch.float32)):
        pages, rows = meta(9, 64, width, dtype=dtype), meta(128, width, dtype=dtype)
        yield Launch(args=(pages, rows, meta(128, dtype=torch.int64)))
