"""Un-pooled rows of the compressors: with positional bias (V4) and without (V4.1)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    for width, ratio in ((1024, 4), (512, 128), (256, 4), (512, 0)):
        kv, ape = meta(128, width, dtype=torch.float32), meta(ratio, width, dtype=torch.float32)
        yield Launch(args=(kv, kv, ape if ratio else None, meta(128, dtype=torch.int64)))
