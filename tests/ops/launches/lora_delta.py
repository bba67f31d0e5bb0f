"""Adapters of the widest map, of a grouped one, and of one with fp32 activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    for dtype, groups, inner, outer in ((torch.bfloat16, 1, 1024, 32768), (torch.bfloat16, 8, 4096, 1024)):
        for own in (torch.float32, dtype):
            slots, scales = meta(128, dtype=torch.int32), meta(128, dtype=torch.float32)
            a, b = meta(128, inner, dtype=own), meta(128, groups, outer, dtype=own)
            yield Launch(args=(meta(64, groups, inner, dtype=dtype), meta(64, dtype=torch.int32), a, b, slots, scales))
