"""Memory that requests hold, so that many together cannot take more than the machine has."""

from __future__ import annotations

import threading

from spyglass.errors import OverloadedError


class MemoryBudget:
    """Bytes of all requests together, at most `most` of them; but one request alone may have what its limits allow."""

    def __init__(self, most: int) -> None:
        self.most, self.total = most, 0
        self.lock = threading.Lock()


class Reservation:
    """What one request holds of them. Any thread."""

    def __init__(self, held: MemoryBudget) -> None:
        self._all, self._mine = held, 0

    def take(self, nbytes: int) -> None:
        """Count more in.

        Raises:
            OverloadedError: what others hold leaves no room.
        """
        held = self._all
        with held.lock:
            if held.total > self._mine and held.total + nbytes > held.most:
                raise OverloadedError(
                    f"bodies and images of requests under way take {held.total} bytes, {held.most} may be; "
                    "send it later"
                )
            held.total += nbytes
            self._mine += nbytes

    def release(self) -> None:
        """Give everything back."""
        with self._all.lock:
            self._all.total -= self._mine
            self._mine = 0
