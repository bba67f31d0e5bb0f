"""Listening: uvicorn with our way to stop, which ends every stream in its protocol's words."""

from __future__ import annotations

import asyncio

import uvicorn
from starlette.applications import Starlette

_POLL_S = 0.1
_LAST_WORDS_S = 5  # after the grace period: time to write what ends a stream


def make_server(app: Starlette, host: str, port: int, grace_s: float) -> uvicorn.Server:
    """A server that is not running yet. Set `should_exit` (or send SIGTERM) to stop it."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=int(grace_s) + _LAST_WORDS_S,
    )
    return uvicorn.Server(config)


async def serve(server: uvicorn.Server, app: Starlette) -> None:
    """Serve until told to stop: no new connections, streams may end within the grace period, then they are ended."""
    ending = asyncio.create_task(_drain_at_exit(server, app))
    try:
        await server.serve()
    finally:
        ending.cancel()


async def _drain_at_exit(server: uvicorn.Server, app: Starlette) -> None:
    while not server.should_exit:
        await asyncio.sleep(_POLL_S)
    await app.state.service.drain()
