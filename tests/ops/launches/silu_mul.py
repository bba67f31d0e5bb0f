"""The MLP of the picture tower."""

from __future__ import annotations

from collections.abc import Iterator

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    yield Launch(args=(meta(784, 2 * 4304),))
