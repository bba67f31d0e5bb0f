"""Processes beside an engine give way by what they have had of a processor."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from spyglass.engine import shares
from spyglass.engine.shares import processor_seconds, wait_giving_way

PID = 2**22 + 1  # more than a kernel gives: nobody's


@pytest.fixture
def channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Which threads were made how nice, from 0 on."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "getpriority", lambda kind, pid: 0)
    monkeypatch.setattr(os, "setpriority", lambda kind, pid, nice: found.append((pid, nice)))
    monkeypatch.setattr(os, "listdir", lambda folder: [str(PID), str(PID + 1)])
    return found


def test_one_that_waits_for_a_busy_machine_gives_no_more_way(
    channel: tuple[socket.socket, socket.socket], told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "LEVELS", ((0.02, 5),))
    ours, theirs = channel
    looks: list[int] = []

    def used(pid: int) -> float:
        looks.append(pid)
        if len(looks) == 5:
            theirs.send(b"x")
        return 7.0  # it gets nothing

    assert not wait_giving_way(ours, PID, 7.0, used=used)
    assert looks == [PID] * 5 and not told


def test_one_gives_way_at_each_level_of_what_it_has_had_since_it_began(
    channel: tuple[socket.socket, socket.socket], told: list[tuple[int, int]]
) -> None:
    ours, theirs = channel
    had = iter((7.0, 7.25, 7.9, 8.0))
    assert wait_giving_way(ours, PID, 7.0, used=lambda _: next(had))
    assert told == [(PID, 5), (PID + 1, 5), (PID, 10), (PID + 1, 10)], "every thread of it: each has its own"
    assert wait_giving_way(ours, PID, 7.0, used=lambda _: 7.5 if theirs.send(b"x") else 0)
    assert told[4:] == [(PID, 5), (PID + 1, 5)], "it had said something before the second"


@pytest.mark.skipif(sys.platform != "linux", reason="clocks of other processes are read on Linux alone")
def test_one_that_has_ended_is_not_waited_for(channel: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(OSError):
        processor_seconds(PID)
    assert not wait_giving_way(channel[0], PID, 0.0)


def test_a_server_with_thousands_of_connections_can_still_wait() -> None:
    ours, theirs = socket.socketpair()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2048)), hard))
    with ours, theirs, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, 1500)) as high:
        assert not wait_giving_way(high, PID, 0.0)
        theirs.send(b"x")
        assert not wait_giving_way(high, os.getpid(), processor_seconds(os.getpid()))


@pytest.mark.skipif(sys.platform != "linux", reason="clocks of other processes are read on Linux alone")
def test_what_a_process_has_had_is_its_processor_time() -> None:
    stop = threading.Event()
    before = processor_seconds(os.getpid())
    threading.Thread(target=stop.wait, args=(60,)).start()
    until = time.process_time() + 0.02
    while time.process_time() < until:
        pass
    stop.set()
    assert abs(processor_seconds(os.getpid()) - before) >= 0.02
    assert abs(processor_seconds(os.getpid()) - time.process_time()) < 0.1
