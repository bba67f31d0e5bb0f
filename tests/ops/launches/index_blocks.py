"""The candidates of V4.1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.ops.launches.index_topk import KEYS, inputs
from tests.ops.triton_lane import Launch


def launches() -> Iterator[Launch]:
    options: dict[str, Any] = {"num_blocks": 2048, "block_size": 8, "max_visible": 131072, "stepwise": True}
    for rows in (8, 4096):
        yield Launch(args=inputs(rows, 32), options=options)
        yield Launch(args=inputs(rows, 32, KEYS), options=options | {"key_format": KEYS})
