"""Shared expert of V4 and V4.1."""

from __future__ import annotations

from collections.abc import Iterator

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    yield Launch(args=(meta(128, 2048), meta(128, 2048)), options={"limit": 10.0})
