"""Index queries and keys."""

from __future__ import annotations

from collections.abc import Iterator

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    yield Launch(args=(meta(128, 64, 128),))
