"""How much of a processor other processes of ours get beside the steps of an engine: the less, the more they have had.

What counts is processor time. By the clock a busy machine would make slow what is short, and slower for being slow.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

# Seconds of a processor, and how much nicer than this process one is that has had them. Nearly all that is refused is
# refused before the first.
LEVELS = ((0.25, 5), (1.0, 10))
_LEAST_SECONDS = 0.01  # between two looks


def processor_seconds(pid: int) -> float:
    """What a process has had of processors; where the system does not tell (it is not Linux), the time of a clock.

    Raises:
        OSError: there is no such process any more.
    """
    if sys.platform != "linux":
        return time.monotonic()
    return time.clock_gettime((~pid << 3) | 2)  # the clock of a process, as `clock_getcpuclockid` names it


def wait_giving_way(
    channel: socket.socket,
    pid: int,
    began: float,
    *,
    levels: Sequence[tuple[float, int]] | None = None,
    used: Callable[[int], float] = processor_seconds,
) -> bool:
    """Wait until a process says something or has ended. It gives way more at each level of what it has had since it
    stood at `began`, which nobody but an administrator can take back. Whether it reached any."""
    gave_way = False
    for seconds, nice in LEVELS if levels is None else levels:
        try:
            while (left := seconds - (used(pid) - began)) > 0:
                if select.select([channel], [], [], max(left, _LEAST_SECONDS))[0]:
                    return gave_way
        except OSError:  # it has ended, which the channel tells
            return gave_way
        gave_way = True
        now = os.getpriority(os.PRIO_PROCESS, 0)
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, pid, max(min(19, now + nice), os.getpriority(os.PRIO_PROCESS, pid)))
    return gave_way
