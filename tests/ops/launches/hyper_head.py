"""The streams at the end."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    weights = (meta(*shape, dtype=torch.float32) for shape in ((4, 4 * 4096), (1,), (4,)))
    yield Launch(args=(meta(32, 4, 4096), *weights), options={"norm_eps": 1e-6, "hc_eps": 1e-6})
