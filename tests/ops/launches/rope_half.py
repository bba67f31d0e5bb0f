"""Queries and keys of the picture tower."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    tables = meta(784, 32, dtype=torch.float32), meta(784, 32, dtype=torch.float32)
    yield Launch(args=(meta(784, 3, 16, 64)[:, :2].flatten(1, 2), *tables))
