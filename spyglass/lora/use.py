"""Which adapter a request uses, as drivers and caches see it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUse:
    """The adapter of a request: its slot in the banks (0 = none) and what caches must tell apart.

    `text_digest` covers the weights, alpha and scale of everything that acts on tokens, `vision_digest` of everything
    that acts on pictures (tower and aligner); empty = none.
    """

    slot: int = 0
    text_digest: bytes = b""
    vision_digest: bytes = b""


NO_ADAPTER = AdapterUse()
