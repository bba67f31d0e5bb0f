"""Streams of V4 and V4.1."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    post, comb = meta(128, 4, dtype=torch.float32), meta(128, 4, 4, dtype=torch.float32)
    yield Launch(args=(meta(128, 4096), meta(128, 4, 4096), post, comb))
