"""Structured logs: one JSON object a line on stderr, about requests, never with their contents."""

from __future__ import annotations

import atexit
import json
import logging
import queue
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import TextIO

_MOST_WAITING, _LAST_SECONDS = (
    10_000,
    2.0,
)  # lines that wait for a slow reader of the log; the time they have at the end
REQUESTS = logging.getLogger("spyglass.server")
AUDIT = logging.getLogger("spyglass.audit")


@dataclass(slots=True, kw_only=True)
class Record:
    """What the log says of one request; filled while it is served. Times in seconds since it began.

    `key` is the name of the API key. `ignored` names request fields without effect here. `client_left`: it did not
    wait for the end. `malformed_tool_call`: an answer held broken markup of tool calls, which was left as text.
    """

    request_id: str
    method: str
    path: str
    status: int = 0
    key: str | None = None
    model: str | None = None
    stream: bool = False
    answers: int = 0
    pictures: int = 0
    prompt_tokens: int = 0
    picture_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    error: str | None = None
    client_left: bool = False
    malformed_tool_call: bool = False
    parse_s: float | None = None
    first_token_s: float | None = None
    total_s: float = 0.0


class JsonLines(logging.Formatter):
    """Every record as one line of JSON; a request's own fields beside the usual ones."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        extra = record.__dict__.get("request")
        return json.dumps({**fields, **extra} if extra else fields, ensure_ascii=False)


class LineWriter(logging.Handler):
    """Writes lines in a thread of its own: who logs never waits for whoever reads the log, nor fails with it.

    Beyond so many lines that wait, and where they cannot be written, lines are left out; `left_out` counts them and a
    later line tells their number.
    """

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
            line = self._lines.get()
            if self.left_out != told:
                told, line = (
                    self.left_out,
                    f'{{"level": "warning", "message": "{self.left_out} lines left out"}}\n{line}',
                )
            try:
                self._out.write(line + "\n")
                self._out.flush()
            except (OSError, ValueError):  # a full disk, a pipe without reader, a closed file
                self.left_out += 1
            self._lines.task_done()


def log_request(record: Record) -> None:
    """Log one request that has been answered; fields that say nothing are left out."""
    level = logging.ERROR if record.status == 500 else logging.INFO  # 503 only says what a server is about
    if REQUESTS.isEnabledFor(level):
        fields = {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in asdict(record).items()
            if value not in (None, 0, False, (), "")
        }
        REQUESTS.log(level, "request", extra={"request": fields})


def log_audit(event: str, record: Record, **more: str) -> None:
    """Log who changed what others get, at any log level."""
    who = {"request_id": record.request_id, "key": record.key or "none", **more}
    AUDIT.info(event, extra={"request": who})


def set_up_logs(level: str) -> None:
    """Send the logs of Spyglass and of the HTTP library to stderr. For the command line: an application has its own."""
    handler = LineWriter(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.captureWarnings(True)  # of the image library, about damaged files
    for name in ("spyglass", "uvicorn", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    AUDIT.setLevel(logging.INFO)
