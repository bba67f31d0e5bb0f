"""Messages come to every reader whole and in order, through the ring or the pipes, however large they are."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe

import numpy as np
import pytest

from spyglass.parallel.channel import RING_BYTES, Receiver, Ring, Sender

READERS = 3


def messages() -> list[bytes]:
    """Some thousands, together several times what the ring holds, and some that it does not hold."""
    random = np.random.default_rng(0)
    sizes = [0, 1, 7, 8, RING_BYTES // 4, RING_BYTES // 4 + 1, 3 * RING_BYTES, *random.integers(0, 9000, 2500).tolist()]
    return [random.bytes(size) for size in random.permutation(sizes)]


@pytest.mark.parametrize("shared", [True, False], ids=["ring", "pipes"])
def test_every_reader_gets_every_message_in_order(shared: bool) -> None:
    sent = messages()
    assert sum(map(len, sent)) > 3 * RING_BYTES
    pairs = [Pipe() for _ in range(READERS)]
    ring = Ring.new() if shared else None
    assert (ring is not None) == shared
    bells = [os.eventfd(0, os.EFD_SEMAPHORE) for _ in pairs] if shared else []
    sender = Sender([ours for ours, _ in pairs], ring, bells, lambda: None)

    def read(number: int) -> list[bytes]:
        mine = None if ring is None else Ring(os.dup(ring.descriptor))
        receiver = Receiver(pairs[number][1], mine, bells[number] if shared else None, number)
        return [receiver.receive() for _ in range(len(sent) + 1)]

    with ThreadPoolExecutor(READERS) as pool:
        reading = [pool.submit(read, number) for number in range(READERS)]
        for one in sent:
            sender.send(one)
        sender.send_each([bytes([number]) for number in range(READERS)])
        for number, each in enumerate(reading):
            assert each.result(60) == [*sent, bytes([number])]


def test_who_waits_for_room_of_readers_that_are_gone_hears_of_it() -> None:
    ring, bell = Ring.new(), os.eventfd(0, os.EFD_SEMAPHORE)
    assert ring is not None
    ours, _theirs = Pipe()
    gone = False

    def check() -> None:
        if gone:
            raise OSError("gone")

    sender = Sender([ours], ring, [bell], check)
    with pytest.raises(OSError, match="gone"):
        for _ in range(9):
            sender.send(bytes(RING_BYTES // 4))
            gone = True
