"""Work that is asked to stop ends after the step, or the piece of an answer, that it is in."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def asked_to_stop(*signals: signal.Signals) -> Iterator[threading.Event]:
    """Set by one of the signals, which then no longer ends the process at once; a second SIGINT does."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # handlers are the main thread's own
        yield asked
        return

    def stop(number: int, frame: object) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
