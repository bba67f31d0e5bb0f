"""What a body may be: JSON, an object, finite, not too large, not too deep. Anything else is refused in words."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.errors import PromptError
from spyglass.server.app import create_app
from spyglass.server.body import parse_json
from tests.server.parts import Live, plain, running

JSON = {"content-type": "application/json"}
MOST = 50_000


@pytest.fixture(scope="module")
def small(llm: LLM) -> Iterator[Live]:
    """A server whose bodies are small."""
    with running(create_app(llm, ServerConfig(max_body_bytes=MOST), endpoints=[plain(llm)])) as server:
        yield server


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"{'ids': 1}", "not JSON"),
        (b"[]", "a list"),
        (b"null", "null"),
        (b"7", "a number"),
        (b'"text"', "a string"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": -Infinity}', "Infinity"),
        (b'{"temperature": 1e999}', "too large"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "more than 4300 digits"),
        (b'{"seed": 1, "seed": 2}', "'seed' is written twice"),
        (b'{"x": [{"y": {"\\u0061": 1, "a": 1}}]}', "'a' is written twice"),
        (b'{"x": "\xff"}', "not UTF-8"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b'{"x": "\\ud800"}', "surrogate"),
        (b'{"x": {"\\uDFFF": 1}}', "surrogate"),
        (b'{"x": ' + b"[" * 200 + b"]" * 200 + b"}", "levels deep"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "levels deep"),
        (b'{"x":' * 5000 + b"1" + b"}" * 5000, "levels deep"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, why: str, live: Live) -> None:
    with pytest.raises(PromptError, match=why):
        parse_json(body)
    answer = live.client.post("/plain", content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert why in answer.json()["plain_error"]["message"]


def test_what_json_allows_is_read_as_it_is() -> None:
    body = {"a": [1, -0.5, True, None, {"b": "ü😀\u2028"}], "": {"deep": [[[[[[{}]]]]]]}}
    assert parse_json(json.dumps(body).encode()) == body
    assert parse_json(json.dumps(body, ensure_ascii=False).encode()) == body


@pytest.mark.parametrize("header", ["origin", "referer", "sec-fetch-site", "sec-fetch-mode"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_page_elsewhere_may_send_without_asking_is_refused(kind: str, header: str, live: Live) -> None:
    sent = {"content-type": kind} if kind else {}
    answer = live.client.post("/plain", content=b"{}", headers={**sent, header: "null"})
    assert answer.status_code == 415 and "application/json" in answer.json()["plain_error"]["message"]


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", ""])
def test_a_program_that_is_no_browser_may_leave_the_content_type_to_curl(kind: str, live: Live) -> None:
    body = b'{"ids": [0, 5], "max_tokens": 1}'
    assert live.client.post("/plain", content=body, headers={"content-type": kind} if kind else {}).is_success
    assert live.client.post("/plain", content=body, headers={"content-type": "text/plain"}).status_code == 415


def test_json_may_say_its_character_set_and_may_not_be_packed(live: Live) -> None:
    assert live.client.post("/plain", content=b"{}", headers={"content-type": "Application/JSON; x=1"}).is_success
    packed = live.client.post("/plain", content=b"{}", headers={**JSON, "content-encoding": "gzip"})
    assert packed.status_code == 415 and "gzip" in packed.json()["plain_error"]["message"]


def sized(size: int) -> bytes:
    """A body that works, of so many bytes."""
    body = b'{"ids": [0, 5], "max_tokens": 1, "user": "%s"}'
    return body % (b"x" * (size - len(body) + 2))


def test_a_body_may_have_exactly_the_bytes_that_are_allowed(small: Live) -> None:
    assert small.client.post("/plain", content=sized(MOST), headers=JSON).status_code == 200
    over = small.client.post("/plain", content=sized(MOST + 1), headers=JSON)
    assert over.status_code == 413 and str(MOST) in over.json()["plain_error"]["message"]
    assert small.client.post("/plain", content=sized(20 * MOST), headers=JSON).status_code == 413


@pytest.mark.parametrize("times", [1.02, 1.9, 40.0, 2000.0])
def test_a_body_without_a_stated_size_is_not_read_to_its_end(times: float, small: Live) -> None:
    total, sent = int(times * MOST), [0]

    def pieces() -> Iterator[bytes]:
        for start in range(0, total, 1000):
            sent[0] = min(start + 1000, total)
            yield b" " * (sent[0] - start)

    try:
        answer = small.client.post("/plain", content=pieces(), headers=JSON)
    except small.client_errors:  # hung up on while it still sent: that is a refusal, too
        assert times > 2
    else:
        assert answer.status_code == 413
    assert sent[0] == total or times > 2
    assert sent[0] < 50_000_000
    assert small.post({"max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("path", ["/plain", "/health", "/nothing"])
def test_a_body_of_two_lengths_is_refused_and_nothing_behind_it_is_read(path: str, live: Live) -> None:
    """A proxy that goes by the other length would take what follows for a part of this body (RFC 9112 6.1)."""
    host, port = live.url.removeprefix("http://").split(":")
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    lengths = "content-length: 12\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    told = b""
    with socket.create_connection((host, int(port)), 10) as raw:
        raw.sendall(f"{head}{lengths}GET /health HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        while data := raw.recv(1 << 16):
            told += data
    assert told.startswith(b"HTTP/1.1 400") and b"not both" in told
    assert told.count(b"HTTP/1.1 ") == 1


def test_a_size_that_is_a_lie_hangs_nobody(small: Live) -> None:
    host, port = small.url.removeprefix("http://").split(":")
    for head in (b"content-length: 9999999999\r\n", b"content-length: 400\r\n", b"content-length: -1\r\n"):
        with socket.create_connection((host, int(port)), 10) as raw:
            raw.sendall(b"POST /plain HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + head + b"\r\n{}")
            if b"400" not in head:
                assert raw.recv(100).startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))
    small.wait_until_idle()
    assert small.post({"max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "body", [{"ids": [10**30]}, {"ids": [-5]}, {"ids": []}, {"max_tokens": -1}, {"temperature": 10**50}, {"n": 10_000}]
)
def test_what_the_engine_refuses_is_a_client_error_before_the_first_byte(body: dict[str, Any], live: Live) -> None:
    for stream in (False, True):
        answer = live.post({**body, "stream": stream})
        assert answer.status_code == 400, answer.text
        assert answer.json()["plain_error"]["message"]
