"""Which adapter a request uses, as drivers and caches see it. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from spyglass.errors import AdapterError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterHandle:
    """The adapter of a request: its id in the banks (0 = none) and what caches must tell apart.

    `text_digest` covers the weights, alpha and scale of everything that acts on tokens, `vision_digest` of everything
    that acts on images (tower and aligner); empty = none.
    """

    adapter_id: int = 0
    text_digest: bytes = b""
    vision_digest: bytes = b""


NO_ADAPTER = AdapterHandle()


def adapter_name(name: object, models: Collection[str] = ()) -> str:
    """`name`, if requests, lists and logs may call an adapter so. Those of `models` are taken.

    Raises:
        AdapterError: they may not; the message says what a name may be.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = repr(name[:_SHOWN_CHARS]) if isinstance(name, str) else type(name).__name__
        raise AdapterError(
            f"an adapter cannot be called {shown}; a name is 1 to 128 letters (A to Z, a to z), digits, '.', '_', '-' "
            "and ':', of which a letter or digit comes first"
        )
    if name in models:
        raise AdapterError(f"{name!r} is both the model and an adapter; give one of them another name")
    return name
