"""Connections that never become a request are closed; whoever gets on is left alone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.server.app import create_app
from spyglass.server.connection import TimedConnection
from tests.server.parts import plain, running, wait_for

LIMIT = 77.0
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"


class Timer:
    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self.seconds, self.call, self.is_set = seconds, call, True

    def cancel(self) -> None:
        self.is_set = False


class Clock:
    """The running event loop, but its timers wait for `strike`."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio.get_running_loop(), name)

    def call_later(self, seconds: float, call: Callable[..., None], *args: Any) -> Timer:
        self.timers.append(Timer(seconds, lambda: call(*args)))
        return self.timers[-1]

    @property
    def running(self) -> list[Timer]:
        return [timer for timer in self.timers if timer.is_set and timer.seconds == LIMIT]

    def strike(self) -> None:
        (timer,) = self.running
        timer.is_set = False
        timer.call()


class Wire(asyncio.Transport):
    """What the server sends, and whether it has closed."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.closed = b"", False

    def write(self, data: Any) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def connection() -> tuple[TimedConnection, Wire, Clock, asyncio.Event]:
    """A fresh connection to an application that answers once the event is set."""
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    config = Config(app, lifespan="off")
    config.load()
    wire, clock = Wire(), Clock()
    made = TimedConnection(config, ServerState(), {}, clock, seconds=LIMIT)  # type: ignore[arg-type]
    made.connection_made(wire)
    return made, wire, clock, go_on


async def until(fact: Callable[[], bool]) -> None:
    while not fact():
        await asyncio.sleep(0)


def test_who_says_nothing_is_closed_without_a_word() -> None:
    async def test() -> None:
        _, wire, clock, _ = connection()
        clock.strike()
        assert wire.closed and wire.sent == b""

    asyncio.run(test())


@pytest.mark.parametrize("lines", [b"GET / HT", b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"x-a: 1\r\n" * 40])
def test_headers_that_come_byte_by_byte_get_408_at_the_limit(lines: bytes) -> None:
    async def test() -> None:
        made, wire, clock, _ = connection()
        for byte in lines:
            made.data_received(bytes([byte]))
        assert len(clock.timers) == 1, "bytes do not wind the clock up again"
        clock.strike()
        assert wire.closed and wire.sent.startswith(b"HTTP/1.1 408 ") and wire.sent.endswith(b"in time.\n")

    asyncio.run(test())


@pytest.mark.parametrize("rest", [b"GET /v1/models HTTP/1.1\r\nx: ", b"Z" * 60])
def test_a_second_request_has_the_same_limit_and_no_words_that_look_like_an_answer(rest: bytes) -> None:
    """Also where it is what is left of a body that nobody asked for."""

    async def test() -> None:
        made, wire, clock, go_on = connection()
        go_on.set()
        long = GET.replace(b"\r\n\r\n", b"\r\ncontent-length: 999\r\n\r\n")
        made.data_received(GET if rest.startswith(b"GET") else long)
        await until(lambda: wire.sent.endswith(b"ok"))
        answer = wire.sent
        made.data_received(rest)
        if not wire.closed:  # uvicorn itself may have closed it
            clock.strike()
        assert wire.closed and wire.sent == answer

    asyncio.run(test())


def test_no_clock_runs_while_a_request_is_answered_or_a_connection_is_idle() -> None:
    async def test() -> None:
        made, wire, clock, go_on = connection()
        for number in range(3):
            made.data_received(GET[:20])
            assert len(clock.running) == 1
            made.data_received(GET[20:])
            assert not clock.running
            go_on.set()
            await until(lambda: wire.sent.count(b"ok") == number + 1)  # noqa: B023
            go_on.clear()
            await asyncio.sleep(0)
            assert not clock.running and not wire.closed, "idle is uvicorn's to time"

    asyncio.run(test())


@pytest.mark.slow
def test_many_that_say_nothing_leave_nothing(llm: LLM) -> None:
    with running(create_app(llm, ServerConfig(), endpoints=[plain(llm)]), header_s=0.5) as live:
        host, port = live.url.removeprefix("http://").split(":")
        silent = [socket.create_connection((host, int(port)), 60) for _ in range(100)]
        assert all(found.recv(100) == b"" for found in silent)
        wait_for(lambda: len(live.server.server_state.connections) <= 1)
        for found in silent:
            found.close()
