"""Pauses that Python itself makes in a process whose threads wait for one another, and how they are kept short."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# What a thread that holds the interpreter's lock keeps it for when another wants it. The engine lets go of it in every
# kernel and operation, hundreds of times in a step, and each time may have to wait so long: with Python's own 5 ms one
# busy thread made half a second of a step.
_SWITCH_SECONDS = 0.0005


@contextmanager
def short_pauses() -> Iterator[None]:
    """While a server runs: the collector of garbage leaves out all that is here already (a look at it took 0.1 s of a
    step, in whatever thread), and threads that want the interpreter wait a tenth of the usual time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_SECONDS))
    gc.collect()  # what loading left behind would stay
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before)
