"""The MLP of the picture tower."""

from __future__ import annotations

from collections.abc import Iterator

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    yield Launch(args=(meta(784, 2 * 4304),))


def train() -> None:
    """What a backward launches."""
    from spyglass.ops.silu_mul.triton_training import gate_gradient

    gate_gradient(meta(4096, 5632), meta(4096, 2816), meta(4096, 5632))
