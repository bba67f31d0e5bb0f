"""Log lines written in a thread of their own: who logs never waits for whoever reads the log, nor fails with it."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from typing import TextIO

_MOST_WAITING = 10_000  # lines
_LAST_SECONDS = 2.0  # for what waits when the process ends


class LineWriter(logging.Handler):
    """Beyond so many lines that wait, and where they cannot be written, lines are left out; `left_out` counts them and
    a later line tells their number."""

    def __init__(self, out: TextIO, most: int = _MOST_WAITING) -> None:
        super().__init__()
        self.left_out = 0
        self._out, self._lines = out, queue.Queue[str](most)
        threading.Thread(target=self._write, name="log", daemon=True).start()
        atexit.register(self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        """Any thread."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self.left_out += 1

    def flush(self) -> None:
        """Wait until what has been logged is written, but not long."""
        until = time.monotonic() + _LAST_SECONDS
        while self._lines.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.01)

    def _write(self) -> None:
        told = 0
        while True:
            lines = [self._lines.get()]
            if self.left_out != told:
                told = self.left_out
                text = f"{told} lines of the log are left out: they cannot be written, or not as fast as they come"
                lines.insert(0, self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, text, (), None)))
            try:
                self._out.write("\n".join([*lines, ""]))
                self._out.flush()
            except (OSError, ValueError):  # a full disk, a pipe without reader, a closed file
                self.left_out += 1
            self._lines.task_done()
