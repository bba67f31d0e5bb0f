"""Messages from one process to some others: bytes through a ring of shared memory, large ones through their pipes.

The ring is anonymous memory (memfd), which no limit of /dev/shm counts and which ends with its last process. A message
is written once; each reader has an eventfd, which counts the messages that it has not taken, and its pipe.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

RING_BYTES = 4 << 20
_LARGEST = RING_BYTES // 4  # of a message in the ring
_HEADER = 4096  # how far each reader has come, 8 bytes each
_LENGTH, _ALIGNMENT = 8, 8
_IN_PIPE, _WRAP = (1 << 63), (1 << 63) + 1  # in place of a length
_FULL_S = 50e-6  # between looks at a ring that is full


class Ring:
    """Shared memory of one writer and some readers. Positions count bytes since the start."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, _HEADER + RING_BYTES)
        self._written = 0

    @classmethod
    def new(cls) -> Ring | None:
        """Fresh memory; None where the system has none of this kind to give."""
        try:
            descriptor = os.memfd_create("spyglass-ring", 0)
        except (AttributeError, OSError):
            return None
        try:
            os.posix_fallocate(descriptor, 0, _HEADER + RING_BYTES)
            return cls(descriptor)
        except OSError:
            os.close(descriptor)
            return None

    def write(self, length: int, payload: bytes, readers: int, check: Callable[[], None]) -> None:
        """Write one message, when all readers have left room for it; `check` raises when they never will."""
        need = _LENGTH + -(-len(payload) // _ALIGNMENT) * _ALIGNMENT
        place = self._written % RING_BYTES
        if place + need > RING_BYTES:  # messages lie in one piece
            self._wait(RING_BYTES - place + need, readers, check)
            struct.pack_into("<Q", self._map, _HEADER + place, _WRAP)
            self._written += RING_BYTES - place
            place = 0
        else:
            self._wait(need, readers, check)
        self._map[_HEADER + place + _LENGTH : _HEADER + place + _LENGTH + len(payload)] = payload
        struct.pack_into("<Q", self._map, _HEADER + place, length)
        self._written += need

    def read(self, reader: int) -> bytes | None:
        """The next message, which is known to be there; None = it comes through the pipe."""
        (position,) = struct.unpack_from("<Q", self._map, 8 * reader)
        place = position % RING_BYTES
        (length,) = struct.unpack_from("<Q", self._map, _HEADER + place)
        if length == _WRAP:
            position += RING_BYTES - place
            place = 0
            (length,) = struct.unpack_from("<Q", self._map, _HEADER)
        size = 0 if length == _IN_PIPE else length
        payload = self._map[_HEADER + place + _LENGTH : _HEADER + place + _LENGTH + size]
        position += _LENGTH + -(-size // _ALIGNMENT) * _ALIGNMENT
        struct.pack_into("<Q", self._map, 8 * reader, position)
        return None if length == _IN_PIPE else payload

    def _wait(self, need: int, readers: int, check: Callable[[], None]) -> None:
        while True:
            slowest = min(struct.unpack_from(f"<{readers}Q", self._map, 0))
            if self._written + need - slowest <= RING_BYTES:
                return
            check()
            time.sleep(_FULL_S)

    def close(self) -> None:
        self._map.close()
        os.close(self.descriptor)


class Sender:
    """Sends to several processes through `pipes`, and through a ring with the readers' `bells` where there is one.

    `check` raises when they have been ended.
    """

    def __init__(
        self, pipes: Sequence[Connection], ring: Ring | None, bells: Sequence[int], check: Callable[[], None]
    ) -> None:
        self._pipes, self._ring, self._bells, self._check = pipes, ring, bells, check

    def send(self, payload: bytes) -> None:
        """One message to all.

        Raises:
            OSError: one of them has ended.
        """
        if self._ring is not None and len(payload) <= _LARGEST:
            self._ring.write(len(payload), payload, len(self._pipes), self._check)
            self._wake()
        else:
            self.send_each([payload] * len(self._pipes))

    def send_each(self, payloads: Sequence[bytes]) -> None:
        """A message of its own to each. Raises OSError as `send`."""
        if self._ring is not None:
            self._ring.write(_IN_PIPE, b"", len(self._pipes), self._check)
            self._wake()
        for pipe, payload in zip(self._pipes, payloads, strict=True):
            pipe.send_bytes(payload)

    def _wake(self) -> None:
        for bell in self._bells:
            os.eventfd_write(bell, 1)


class Receiver:
    """The messages for one process, in order."""

    def __init__(self, pipe: Connection, ring: Ring | None, bell: int | None, reader: int) -> None:
        self._pipe, self._ring, self._bell, self._reader = pipe, ring, bell, reader

    def receive(self) -> bytes:
        """The next message; waits for it without taking any time of the processor.

        Raises:
            EOFError, OSError: the sender has ended.
        """
        if self._ring is None or self._bell is None:
            return self._pipe.recv_bytes()
        os.eventfd_read(self._bell)
        payload = self._ring.read(self._reader)
        return self._pipe.recv_bytes() if payload is None else payload
