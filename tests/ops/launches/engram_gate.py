"""Streams of V4.1, with images and without."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    weights = meta(4, 5120, dtype=torch.float32), meta(4, 5120, dtype=torch.float32)
    for images in (None, meta(32, dtype=torch.bool)):
        options = {"eps": 1e-6, "picture_T": images}
        yield Launch(args=(meta(32, 4, 5120), meta(32, 5 * 5120), *weights), options=options)
