"""Remote pictures: what is public is fetched, however it redirects; what is not is never even dialled."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from spyglass.errors import PromptError
from spyglass.prompt.decode import ImageLimits
from spyglass.server.fetch import RemoteImages, is_public

PUBLIC = "93.184.216.34"
PRIVATE = [
    "0.0.0.0",
    "10.0.0.1",
    "100.64.0.1",
    "100.100.100.200",
    "127.0.0.1",
    "127.9.9.9",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "192.0.0.1",
    "192.168.1.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::127.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "2002:7f00:1::",
    "2001:0:1::1",
    "2001:db8::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
]


class Site(BaseHTTPRequestHandler):
    """`/picture`, redirects, and pages that misbehave."""

    pages: Mapping[str, tuple[int, dict[str, str], bytes]]
    asked: list[tuple[str, str]]

    def do_GET(self) -> None:
        self.asked.append((self.headers["host"], self.path))
        if self.path == "/drip":
            self.send_response(200)
            self.end_headers()
            self.drip()
            return
        status, headers, body = self.pages.get(self.path, (404, {}, b""))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def drip(self) -> None:
        try:
            for _ in range(200):
                self.wfile.write(b"x")
                time.sleep(0.05)
        except OSError:
            return

    def log_message(self, *args: Any) -> None:
        return


@contextmanager
def site(pages: Mapping[str, tuple[int, dict[str, str], bytes]]) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """A local server; its port and what it was asked: (host header, path)."""
    asked: list[tuple[str, str]] = []
    handler = type("Handler", (Site,), {"pages": pages, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1], asked
    finally:
        server.shutdown()
        server.server_close()


def remote(port: int, names: Mapping[str, Any] | None = None, **changes: Any) -> tuple[RemoteImages, list[str]]:
    """A fetcher whose names are made up, and the addresses that it dials: all of them lead to the local server."""
    answers = {"pictures.example": [[PUBLIC]], **(names or {})}
    dialled: list[str] = []

    def resolve(host: str, _: int) -> list[str]:
        found = answers.get(host, [[host]])
        return found.pop(0) if len(found) > 1 else found[0]

    def dial(address: str, _: int, timeout: float) -> socket.socket:
        dialled.append(address)
        return socket.create_connection(("127.0.0.1", port), timeout)

    settings: dict[str, Any] = {"seconds": 5.0, "limits": ImageLimits(), **changes}
    return RemoteImages(resolve=resolve, dial=dial, **settings), dialled


@pytest.mark.parametrize("text", PRIVATE)
def test_an_address_that_is_not_public_is_never_dialled(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))
    with site({"/": (200, {}, b"secret")}) as (port, asked):
        fetch, dialled = remote(port, {"inside.example": [[text]], "both.example": [[PUBLIC, text]]})
        for host in ("inside.example", "both.example"):
            with pytest.raises(PromptError, match="not a public address"):
                fetch(f"http://{host}/")
        assert not dialled and not asked


@pytest.mark.parametrize("text", [PUBLIC, "8.8.8.8", "2606:4700:4700::1111", "64:ff9b::8.8.8.8", "::ffff:8.8.8.8"])
def test_public_addresses_are_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


def test_a_name_is_looked_up_once_and_the_checked_address_is_dialled() -> None:
    """A name that answers differently the second time gains nothing."""
    with site({"/picture": (200, {}, b"bytes")}) as (port, asked):
        fetch, dialled = remote(port, {"turning.example": [[PUBLIC], ["127.0.0.1"]]})
        assert fetch("http://turning.example/picture") == b"bytes"
        assert dialled == [PUBLIC] and asked[0][0] == "turning.example"


def test_redirects_are_followed_and_each_hop_is_checked() -> None:
    pages = {
        "/a": (302, {"location": "/b"}, b""),
        "/b": (307, {"location": "http://cdn.example/picture"}, b""),
        "/picture": (200, {"content-length": "5"}, b"bytes"),
        "/in": (302, {"location": "http://inside.example/picture"}, b""),
        "/literal": (302, {"location": "http://127.0.0.1/picture"}, b""),
        "/file": (302, {"location": "file:///etc/passwd"}, b""),
        "/loop": (302, {"location": "/loop"}, b""),
        "/nowhere": (302, {}, b""),
    }
    with site(pages) as (port, asked):
        names = {"cdn.example": [["8.8.8.8"]], "inside.example": [["10.1.2.3"]]}
        fetch, dialled = remote(port, names)
        assert fetch("http://pictures.example/a") == b"bytes"
        assert dialled == [PUBLIC, PUBLIC, "8.8.8.8"] and [path for _, path in asked] == ["/a", "/b", "/picture"]
        for path, why in {
            "/in": "not a public address",
            "/literal": "not a public address",
            "/file": "only http and https",
            "/loop": "more than 5 times",
            "/nowhere": "to nowhere",
        }.items():
            with pytest.raises(PromptError, match=why):
                fetch(f"http://pictures.example{path}")
        assert not {"10.1.2.3", "127.0.0.1"} & set(dialled)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://pictures.example/x", "only http and https"),
        ("http:///x", "no host"),
        ("http://me:secret@pictures.example/x", "user name or password"),
        ("http://pictures.example/x y", "spaces"),
        ("http://pictures.example/x\r\nhost: y", "spaces or control"),
        ("http://pictures.example:99999/x", "cannot be fetched"),
        ("http://[::1/x", "cannot be fetched"),
        ("http://" + "x" * 300 + "/", "no host name|not a public|cannot be fetched"),
        ("http://pictures.example/" + "x" * 8192, "characters"),
        ("http://pictures.example/absent", "status 404"),
    ],
)
def test_an_address_that_cannot_be_meant_is_refused_in_words(url: str, why: str) -> None:
    with site({}) as (port, _):
        fetch, _ = remote(port)
        with pytest.raises(PromptError, match=why):
            fetch(url)


def test_bytes_are_counted_over_all_pictures_of_a_request() -> None:
    with site({"/picture": (200, {}, bytes(600))}) as (port, _):
        limits = replace(ImageLimits(), file_bytes=700, total_bytes=1000)
        fetch, _ = remote(port, limits=limits)
        assert len(fetch("http://pictures.example/picture")) == 600
        with pytest.raises(PromptError, match="larger than the 400 bytes"):
            fetch("http://pictures.example/picture")
        small, _ = remote(port, limits=replace(limits, file_bytes=599))
        with pytest.raises(PromptError, match="larger than the 599 bytes"):
            small("http://pictures.example/picture")


def test_a_picture_that_ends_early_is_refused() -> None:
    with site({"/picture": (200, {"content-length": "900"}, bytes(600))}) as (port, _):
        fetch, _ = remote(port)
        with pytest.raises(PromptError, match=r"ended early|cannot be fetched"):
            fetch("http://pictures.example/picture")


def test_a_site_that_drips_is_left_at_the_deadline() -> None:
    with site({}) as (port, _):
        fetch, _ = remote(port, seconds=0.4)
        with pytest.raises(PromptError, match=r"more than the 0\.4 s"):
            fetch("http://pictures.example/drip")


def test_a_site_that_never_speaks_is_left_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        fetch, _ = remote(silent.getsockname()[1], seconds=0.3)
        for scheme in ("http", "https"):
            with pytest.raises(PromptError, match=r"more than the 0\.3 s"):
                fetch(f"{scheme}://pictures.example/")
