"""Pictures over HTTP: the published limits, hostile files, remote addresses (the smallest protocol; real engine)."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.server.app import create_app
from tests.server.parts import Live, data_url, plain, running
from tests.server.test_fetch import remote, site


def png(width: int, height: int, mode: str = "L") -> str:
    """A picture of one colour, as data URL."""
    return data_url(Image.new(mode, (width, height)))


def count(server: Live, *images: str) -> tuple[int, str]:
    answer = server.post({"ids": [0], "images": list(images), "count": True})
    return answer.status_code, answer.text


def bomb(side: int) -> str:
    """A valid PNG of side x side grey pixels of one value, some hundred kilobytes however large."""
    packer = zlib.compressobj(9)
    line = bytes(side + 1)
    data = b"".join(packer.compress(line) for _ in range(side)) + packer.flush()

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    whole = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(whole).decode()


def test_a_side_may_have_8192_pixels(live: Live) -> None:
    assert count(live, png(8192, 10))[0] == 200
    status, text = count(live, png(8193, 10))
    assert status == 400 and "8193x10" in text and "8192" in text


def test_from_fifteen_pictures_on_a_side_may_have_4096(live: Live) -> None:
    assert count(live, *[png(4097, 4)] * 14)[0] == 200
    status, text = count(live, *[png(4097, 4)] * 15)
    assert status == 400 and "4096" in text
    assert count(live, *[png(4096, 4)] * 15)[0] == 200


def test_a_small_file_of_huge_pixels_is_refused_before_it_is_unpacked(live: Live) -> None:
    status, text = count(live, bomb(20_000))
    assert status == 400 and "pixels" in text


def test_pixels_are_counted_over_the_pictures_of_a_request(llm: LLM) -> None:
    config = ServerConfig(max_image_pixels=30_000)
    with running(create_app(llm, config, endpoints=[plain(llm, config)])) as server:
        assert count(server, *[png(100, 100)] * 3)[0] == 200
        status, text = count(server, *[png(100, 100)] * 4)
        assert status == 400 and "30000 pixels" in text


def test_bytes_are_counted_for_one_and_for_all(llm: LLM) -> None:
    noise = data_url(Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 60, 3), np.uint8)))
    size = len(base64.b64decode(noise.partition(",")[2]))
    config = ServerConfig(max_image_bytes=size, max_total_image_bytes=3 * size)
    with running(create_app(llm, config, endpoints=[plain(llm, config)])) as server:
        assert count(server, *[noise] * 3)[0] == 200
        assert count(server, *[noise] * 4)[0] == 400
    config = replace(config, max_image_bytes=size - 1)
    with running(create_app(llm, config, endpoints=[plain(llm, config)])) as server:
        assert count(server, noise)[0] == 400


def test_the_kind_of_a_file_is_what_its_bytes_say(live: Live) -> None:
    url = png(40, 40)
    expected = count(live, url)
    body = url.partition(",")[2]
    for head in ("data:image/jpeg;base64", "data:image/png;charset=utf-8;x=y;base64", "data:;base64", "data:;BASE64"):
        assert count(live, f"{head},{body}") == expected
    assert count(live, "data:image/png;base64," + body.rstrip("=")) == expected


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_an_animation_is_its_first_frame(kind: str, live: Live) -> None:
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "green", "blue")]
    out = io.BytesIO()
    frames[0].save(out, kind, save_all=True, append_images=frames[1:], duration=100, lossless=True)
    url = "data:image/gif;base64," + base64.b64encode(out.getvalue()).decode()
    body = {"ids": [0, 9], "max_tokens": 6}
    moving, still = live.post({**body, "images": [url]}), live.post({**body, "images": [data_url(frames[0])]})
    assert moving.status_code == 200 and moving.json()["answers"] == still.json()["answers"]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "data:",
        "data:image/png;base64",
        "data:image/png;base64,",
        "data:image/png;base64,!!!!",
        "data:image/png;base64,aGVsbG8=",
        "http://93.184.216.34/x.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "photo.png",
    ],
)
def test_what_is_no_picture_is_a_client_error(url: str, live: Live) -> None:
    status, text = count(live, url)
    assert status == 400 and "root:" not in text


def test_a_truncated_picture_is_a_client_error(live: Live) -> None:
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 255, (50, 50, 3), np.uint8))
    whole = base64.b64decode(data_url(noise).partition(",")[2])
    for part in (8, 40, len(whole) // 2):
        url = "data:image/png;base64," + base64.b64encode(whole[:part]).decode()
        assert count(live, url)[0] == 400


@pytest.fixture
def fetching(llm: LLM) -> Iterator[Live]:
    config = ServerConfig(remote_images=True)
    with running(create_app(llm, config, endpoints=[plain(llm, config)])) as server:
        yield server


def test_remote_pictures_are_fetched_when_allowed_and_never_from_inside(
    fetching: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = base64.b64decode(png(40, 40).partition(",")[2])
    pages = {"/a": (302, {"location": "/b.png"}, b""), "/b.png": (200, {}, picture)}
    with site(pages) as (port, asked):
        images = remote(port, {"in.example": [["10.0.0.1"]]})[0]
        monkeypatch.setattr("spyglass.server.parsing.RemoteImages", lambda **_: images)
        assert count(fetching, "http://pictures.example/a") == count(fetching, png(40, 40))
        assert len(asked) == 2
        for url in (f"http://127.0.0.1:{port}/b.png", "http://in.example/b.png", "http://[::1]/b.png"):
            status, text = count(fetching, url)
            assert status == 400 and "not a public address" in text
        assert len(asked) == 2


def test_the_server_s_own_fetcher_refuses_what_is_inside(fetching: Live) -> None:
    for url in ("http://127.0.0.1/x", "http://localhost/x", "http://2130706433/x", "http://0x7f.1/x", "http://0/x"):
        status, text = count(fetching, url)
        assert status == 400 and "not a public address" in text, url
