"""What is logged: records of requests, never their contents, and who changed what others get."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

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
    images: int = 0
    prompt_tokens: int = 0
    image_tokens: int = 0
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
