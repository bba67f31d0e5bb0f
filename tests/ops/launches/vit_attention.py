"""Attention of the picture tower."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    offsets = (0, 784, 784 + 3312)
    for heads, dim in ((16, 64), (16, 128), (4, 32)):
        q = meta(offsets[-1], heads, dim)
        cu_seqlens = meta(3, dtype=torch.int32)
        yield Launch(args=(q, q, q, cu_seqlens), options={"offsets": offsets, "scale": dim**-0.5})
