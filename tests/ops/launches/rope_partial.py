"""Query heads and their outputs, stored rows, index queries."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    tables = meta(128, 32, dtype=torch.float32), meta(128, 32, dtype=torch.float32)
    yield Launch(args=(meta(128, 64, 512), *tables))
    yield Launch(args=(meta(128, 64, 512), *tables), options={"inverse": True})
    yield Launch(args=(meta(128, 512), *tables))
    yield Launch(args=(meta(128, 64, 128), *tables))
