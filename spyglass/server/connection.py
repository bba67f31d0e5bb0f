"""A connection that must get on: uvicorn times the pause behind an answer, not a request whose headers come for ever.

A clock runs while no request is under way, from the connection's start or from the first byte of what should become
the next request; bytes do not wind it up again. The body has a clock of its own (`body`), an idle connection uvicorn's.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from spyglass.server.limits import UNREAD_SECONDS

HEADER_SECONDS = 30.0
_PROBE_S = 0.5
_LATE = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain\r\ncontent-length: 34\r\nconnection: close\r\n\r\n"
    b"the request did not come in time.\n"
)


class TimedConnection(asyncio.Protocol):
    """Passes everything on to uvicorn's protocol, and closes what has had no whole request within `seconds`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        seconds: float = HEADER_SECONDS,
    ) -> None:
        self._inner = H11Protocol(config, server_state, app_state, _loop)
        self._seconds = seconds
        self._clock: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._is_first = True  # no request has come yet
        self._has_begun = False  # but bytes of one have

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner.connection_made(transport)  # type: ignore[arg-type]
        self._start()

    def data_received(self, data: bytes) -> None:
        """Bytes, which may complete the headers of a request."""
        self._inner.data_received(data)
        if self._is_answering():
            self._is_first = False
            self._stop()
        else:
            self._has_begun = True
            self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        if self._unread is not None:
            self._unread.cancel()
        self._inner.connection_lost(exc)

    def eof_received(self) -> bool:
        """The client has sent all. One that only closed its sending half gets its answer; one that has gone is found
        out by what is written to it."""
        self._inner.eof_received()
        self._probe()
        return self._is_answering()

    def pause_writing(self) -> None:
        """The client does not read. What lies here for it is given up in the end, also behind a whole answer."""
        self._inner.pause_writing()
        self._unread = self._inner.loop.call_later(UNREAD_SECONDS, self._inner.transport.abort)

    def resume_writing(self) -> None:
        """The client has read what lay here."""
        self._inner.resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _is_answering(self) -> bool:
        cycle = self._inner.cycle
        return cycle is not None and not cycle.response_complete

    def _probe(self) -> None:
        """Write an interim answer (RFC 9110 15.2) before the first byte of the real one, again and again: a peer that
        has closed refuses it, and the connection ends."""
        cycle = self._inner.cycle
        if cycle is None or cycle.response_complete or self._inner.transport.is_closing():
            return
        if not cycle.response_started and cycle.scope["http_version"] == "1.1":
            self._inner.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        self._inner.loop.call_later(_PROBE_S, self._probe)

    def _start(self) -> None:
        if self._clock is None:
            self._clock = self._inner.loop.call_later(self._seconds, self._close)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _close(self) -> None:
        transport = self._inner.transport
        if self._is_first and self._has_begun and not transport.is_closing():  # else taken for the answer before
            transport.write(_LATE)
        transport.close()


def timed(seconds: float) -> Any:
    """What `uvicorn.Config` takes as its `http`."""
    return partial(TimedConnection, seconds=seconds)
