"""How what is logged becomes lines on stderr: a JSON object a line, or a line for people; and a line of throughput."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Literal

from spyglass.engine.stats import EngineStats
from spyglass.server.line_writer import LineWriter
from spyglass.server.log import AUDIT, REQUESTS

THROUGHPUT_SECONDS = 10.0


class JsonLines(logging.Formatter):
    """Every record as one line of JSON; a request's own fields beside the usual ones."""

    def format(self, record: logging.LogRecord) -> str:
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


class PlainLines(logging.Formatter):
    """Every record as a line for people: the time of day, the message, then what else is known, named."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; a traceback follows on lines of its own."""
        extra = dict(record.__dict__.get("request") or {})
        message = record.getMessage()
        if "path" in extra:
            message = f"{extra.pop('method', '')} {extra.pop('path')} {extra.pop('status', '')}".strip()
        told = [f"{name} {_plain(value)}" for name, value in extra.items()]
        level = "" if record.levelno == logging.INFO else record.levelname.lower() + ": "
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {level}{message}"
        line = ", ".join([line, *told])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


async def log_throughput(read: Callable[[], EngineStats], seconds: float = THROUGHPUT_SECONDS) -> None:
    """One line every so many seconds in which the engine took a step: what runs and waits, tokens per second, caches.

    `read` gives the engine's counters. It goes on until it is cancelled.
    """
    before, at = read(), time.monotonic()
    while True:
        await asyncio.sleep(seconds)
        now, moment = read(), time.monotonic()
        if now.steps > before.steps:
            REQUESTS.info("throughput", extra={"request": _throughput(before, now, moment - at)})
        before, at = now, moment


def _throughput(before: EngineStats, now: EngineStats, seconds: float) -> dict[str, float]:
    queries = now.prefix_queries - before.prefix_queries
    return {
        "running": now.running,
        "waiting": now.waiting,
        "prompt_tokens_per_s": round((now.prompt_tokens - before.prompt_tokens) / seconds, 1),
        "generated_tokens_per_s": round((now.generated_tokens - before.generated_tokens) / seconds, 1),
        "cache_used": round(now.cache_share, 3),
        "prefix_hits": round((now.prefix_hits - before.prefix_hits) / queries, 3) if queries else 0.0,
    }


def set_up_logs(level: str, form: Literal["auto", "text", "json"] = "auto") -> None:
    """Send the logs of Spyglass and of the HTTP library to stderr. For the command line: an application has its own.

    `form`: lines for people, JSON, or whichever suits what stderr is.
    """
    handler = LineWriter(sys.stderr)
    plain = sys.stderr.isatty() if form == "auto" else form == "text"
    handler.setFormatter(PlainLines() if plain else JsonLines())
    logging.captureWarnings(True)  # of the image library, about damaged files
    for name in ("spyglass", "uvicorn", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    AUDIT.setLevel(logging.INFO)
