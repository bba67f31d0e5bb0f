"""Routed and shared outputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    yield Launch(args=(meta(128, 4096, dtype=torch.float32), meta(128, 4096)))
