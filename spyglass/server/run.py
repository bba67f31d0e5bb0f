"""Listening: uvicorn with our way to stop, which ends every stream in its protocol's words."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from spyglass.errors import ConfigError
from spyglass.server.connection import HEADER_SECONDS, timed
from spyglass.server.tls import Certificate

_POLL_S = 0.1
# A machine that went without a word is asked after a minute and given up after two; systems wait hours by default.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
_FAILED_S = 2.0  # between a failure that ends the server and its end
_LAST_WORDS_S = 5  # after the grace period: time to write what ends a stream


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the address and does not listen yet; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections take these over from it
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        found.bind(address)
    except OSError as error:
        option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another {option}") from error
    return found


def bind_unix(path: str) -> socket.socket:
    """A Unix socket at a path, which does not listen yet; one that a server left behind is replaced.

    Raises:
        ConfigError: something else is there, a server listens there, or it cannot be made.
    """
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.lexists(path):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ConfigError(f"uds {path!r} is there and is no socket; choose another path")
            if found.connect_ex(path) != errno.ECONNREFUSED:
                raise ConfigError(f"a server listens at {path!r}; choose another path")
            os.unlink(path)
            found.close()
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        found.bind(path)
    except OSError as error:
        raise ConfigError(f"cannot listen at {path!r}: {error.strerror or error}; choose another --uds") from error
    return found


class Server(uvicorn.Server):
    """Stops at the first signal when answers have ended or the grace period has; at the second it ends answers at once,
    each in its protocol's words; at the third it is gone."""

    hurry = False
    certificate: Certificate | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)
        elif not self.hurry:
            self.hurry = True
        else:
            os._exit(128 + sig)


def make_server(
    app: Starlette, grace_s: float, *, header_s: float = HEADER_SECONDS, certificate: Certificate | None = None
) -> Server:
    """A server that is not running yet. Set `should_exit` (or send SIGTERM) to stop it.

    `header_s`: time in which a connection must have brought the headers of a request. With a `certificate` it speaks
    https alone.
    """
    config = uvicorn.Config(
        app,
        http=timed(header_s),
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=int(grace_s) + _LAST_WORDS_S,
        ssl_context_factory=None if certificate is None else lambda config, default: certificate.context,
    )
    server = Server(config)
    server.certificate = certificate
    return server


async def serve(server: Server, app: Starlette, listening: socket.socket) -> None:
    """Serve until told to stop: no new connections, streams may end within the grace period, then they are ended."""
    tasks = [asyncio.create_task(_drain_at_exit(server, app))]
    if server.certificate is not None:
        tasks.append(asyncio.create_task(server.certificate.watch()))
    try:
        await server.serve([listening])
    finally:
        for task in tasks:
            task.cancel()


async def _drain_at_exit(server: Server, app: Starlette) -> None:
    service = app.state.service
    while not server.should_exit and (service.ranks is None or service.ranks.failure is None):
        await asyncio.sleep(_POLL_S)
    if not server.should_exit:  # nothing can be answered any more, which /health says meanwhile
        await asyncio.sleep(_FAILED_S)
        server.should_exit = server.hurry = True
    draining = asyncio.create_task(service.drain())
    while not draining.done() and not server.hurry:
        await asyncio.sleep(_POLL_S)
    if server.hurry:
        await service.worker.drain(0)
    await draining
