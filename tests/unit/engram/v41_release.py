"""The release's engram numbers (spec v41 1.1, 5.2), for tests of the room."""

from __future__ import annotations

from spyglass.config import EngramConfig

RELEASE = EngramConfig(
    layers=(1, 14),
    num_rows=(384006168, 384016682),
    max_ngram=4,
    prime_above=16000000,
    num_heads=8,
    head_dim=256,
    pad_token_id=2,
    num_classes=99092,
)
SMALL = EngramConfig(
    layers=(1, 3),
    num_rows=(6126, 6332),
    max_ngram=4,
    prime_above=1000,
    num_heads=2,
    head_dim=32,
    pad_token_id=2,
    num_classes=400,
)
