"""Work that may run beside other work of the same step: side streams of a CUDA graph; elsewhere all runs in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStreams:
    """Side streams of one device, used while a graph is captured: only there do their launches cost the host nothing.

    What a branch reads must be held until `join`: memory that the main stream gives back sooner is used again at once.
    What a branch made is read after `join`, and given back before the next branch begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._open: list[torch.cuda.Stream] = []

    @contextmanager
    def branch(self, which: int = 0) -> Iterator[None]:
        """Launches inside go to side stream `which`, behind what the main stream has been given so far."""
        if self._device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            self._open.clear()  # of a capture that failed
            yield
            return
        if which not in self._streams:
            # first in line: there is little to do in a branch, and the main stream waits for its end
            self._streams[which] = torch.cuda.Stream(self._device, priority=-1)
        side = self._streams[which]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield
        self._open.append(side)

    def join(self) -> None:
        """What follows comes behind all branches."""
        for side in self._open:
            torch.cuda.current_stream().wait_stream(side)
        self._open.clear()
