"""Memory that requests hold, so that many together cannot take more than the machine has."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from spyglass.engine.shares import ANYBODY, Client, Places
from spyglass.errors import OverloadedError

_TRIMMED, _TRIM_SECONDS = 32 << 20, 0.5


class MemoryBudget:
    """Bytes of all requests together, at most `most` of them; but one request alone may have what its limits allow.
    Of several `clients` none can take what belongs to the others (`Places`)."""

    def __init__(self, most: int, clients: Sequence[Client] = ()) -> None:
        self.places = Places(most, clients)
        self.lock = threading.Lock()
        self._unreturned = 0

    def give_back(self, nbytes: int) -> None:
        """Return to the system what the allocator keeps for later, when requests have given so much back. Any thread,
        with the lock held."""
        self._unreturned += nbytes
        if self._unreturned >= _TRIMMED:
            self._unreturned = 0
            timer = threading.Timer(_TRIM_SECONDS, trim)  # when what was counted is free
            timer.daemon = True
            timer.start()

    @property
    def total(self) -> int:
        return self.places.num_taken


class Reservation:
    """What one request of a client holds of them. Any thread."""

    def __init__(self, held: MemoryBudget, client: Client = ANYBODY) -> None:
        self._all, self._client, self._mine = held, client, 0

    def take(self, nbytes: int) -> None:
        """Count more in.

        Raises:
            OverloadedError: what others hold leaves no room.
        """
        held = self._all
        with held.lock:
            if held.total > self._mine and not held.places.has_room(self._client, nbytes):
                raise OverloadedError(
                    f"bodies and images of requests under way take {held.total} bytes, {held.places.most} may be; "
                    "send it later"
                )
            held.places.take(self._client, nbytes)
            self._mine += nbytes

    def release(self) -> None:
        with self._all.lock:
            self._all.places.take(self._client, -self._mine)
            self._all.give_back(self._mine)
            self._mine = 0


def trim() -> None:
    """Return to the system what the allocator keeps for later."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc's
        library.malloc_trim(0)
