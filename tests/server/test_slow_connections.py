"""Connections that never become a request are closed; whoever gets on is left alone."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.server.app import create_app
from tests.server.parts import Live, plain, running

pytestmark = pytest.mark.slow
LIMIT = 0.6
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def strict(llm: LLM) -> Iterator[Live]:
    with running(create_app(llm, ServerConfig(), endpoints=[plain(llm)]), header_s=LIMIT) as live:
        yield live


@contextmanager
def connected(live: Live) -> Iterator[socket.socket]:
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as found:
        yield found


def read_to_end(found: socket.socket) -> tuple[bytes, float]:
    """What still comes, and seconds until the other side has closed."""
    began, told = time.monotonic(), b""
    try:
        while data := found.recv(1 << 16):
            told += data
    except ConnectionResetError:
        pass
    return told, time.monotonic() - began


def trickle(found: socket.socket, data: bytes, pause: float = 0.05) -> bool:
    """Send byte by byte; whether the other side took them all."""
    try:
        for byte in data:
            found.sendall(bytes([byte]))
            time.sleep(pause)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def read_answer(found: socket.socket) -> bytes:
    """One whole answer that has a content-length."""
    told = b""
    while b"\r\n\r\n" not in told:
        told += found.recv(1 << 16)
    head, _, body = told.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += found.recv(1 << 16)
    return head


def test_who_says_nothing_is_closed_without_a_word(strict: Live) -> None:
    with connected(strict) as found:
        told, seconds = read_to_end(found)
    assert told == b"" and LIMIT * 0.8 < seconds < LIMIT + 2


@pytest.mark.parametrize("lines", [b"GET / HT", b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"x-a: 1\r\n" * 40])
def test_headers_that_come_byte_by_byte_get_408_at_the_limit(strict: Live, lines: bytes) -> None:
    began = time.monotonic()
    with connected(strict) as found:
        trickle(found, lines)
        told, _ = read_to_end(found)
    assert told.startswith(b"HTTP/1.1 408 ") or told == b"", "a reset may have taken the words away"
    assert time.monotonic() - began < len(lines) * 0.08 + LIMIT + 2
    with connected(strict) as found:
        found.sendall(lines[:8])
        told, seconds = read_to_end(found)
    assert told.startswith(b"HTTP/1.1 408 ") and told.endswith(b"in time.\n") and seconds < LIMIT + 2


@pytest.mark.parametrize("rest", [b"GET /v1/models HTTP/1.1\r\nx: ", b"Z" * 60])
def test_a_second_request_has_the_same_limit(strict: Live, rest: bytes) -> None:
    """Also where it is what is left of a body that nobody asked for."""
    first = GET if rest.startswith(b"GET") else GET.replace(b"\r\n\r\n", b"\r\ncontent-length: 999\r\n\r\n")
    with connected(strict) as found:
        found.sendall(first)
        assert read_answer(found).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        assert not trickle(found, rest * 9) and time.monotonic() - began < LIMIT + 2


def test_requests_in_time_are_answered_on_one_connection_however_long_each_takes(strict: Live) -> None:
    with connected(strict) as found:
        for _ in range(3):
            assert trickle(found, GET, LIMIT / len(GET) / 3)
            assert read_answer(found).startswith(b"HTTP/1.1 200")
            time.sleep(LIMIT * 1.5)  # idle is uvicorn's to time, which gives five seconds
    began = time.monotonic()
    reply = strict.post({"max_tokens": 800, "stream": True})
    assert reply.status_code == 200 and reply.text.count("data: ") > 600
    assert time.monotonic() - began > LIMIT, "it took longer than headers may"


def test_many_that_say_nothing_keep_nobody_waiting_and_leave_nothing(strict: Live) -> None:
    socks = []
    try:
        for _ in range(200):
            context = connected(strict)
            socks.append((context, context.__enter__()))
        assert strict.client.get("/health").status_code == 200
        assert all(read_to_end(found)[0] == b"" for _, found in socks)
    finally:
        for context, _ in socks:
            context.__exit__(None, None, None)
    until = time.monotonic() + 5
    while len(strict.server.server_state.connections) > 1 and time.monotonic() < until:
        time.sleep(0.02)
    assert len(strict.server.server_state.connections) <= 1
