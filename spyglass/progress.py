"""Progress that is never silent: a bar on a terminal, elsewhere a line on standard error every ten seconds; and how an
amount of bytes is told."""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

from tqdm import tqdm

LINE_SECONDS = 10.0
_LINE = "{desc}: {percentage:.0f} %, {n_fmt} of {total_fmt} in {elapsed}, {rate_fmt}, about {remaining} left{postfix}"
_WITHOUT_TOTAL = "{desc}: {n_fmt} in {elapsed}, {rate_fmt}{postfix}"


class Progress(tqdm):  # type: ignore[misc]  # untyped library
    """A `tqdm` bar where standard error is a terminal. Elsewhere the same facts as lines, from a thread of its own, so
    that a step of many minutes is told too; what ends within ten seconds says nothing. `show` False: neither.
    """

    def __init__(self, *args: Any, show: bool = True, line_seconds: float = LINE_SECONDS, **options: Any) -> None:
        self._ended: threading.Event | None = None
        self._lines = lines = show and not sys.stderr.isatty()
        if lines:
            options["bar_format"] = _LINE if options.get("total") else _WITHOUT_TOTAL
        super().__init__(*args, disable=not show, file=io.StringIO() if lines else sys.stderr, **options)
        if lines:
            self._ended = threading.Event()
            threading.Thread(target=self._tell, args=(self._ended, line_seconds), daemon=True).start()

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if not self._lines:
            super().display(msg, pos)

    def close(self) -> None:
        """No more lines, and the bar as it ended."""
        if self._ended is not None:
            self._ended.set()
        super().close()

    def _tell(self, ended: threading.Event, seconds: float) -> None:
        while not ended.wait(seconds):
            print(str(self), file=sys.stderr, flush=True)


def tell(text: str) -> None:
    """A remark to whoever runs a command, on standard error."""
    print(f"spyglass: {text}", file=sys.stderr, flush=True)


def shown_bytes(nbytes: float) -> str:
    """An amount as people read it: GB, MB or kB."""
    if nbytes >= 10**9:
        return f"{nbytes / 1e9:,.2f} GB"
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 10**6 else f"{nbytes / 1e3:.1f} kB"
