"""Who waits for pictures from elsewhere: nobody waits for them, and what they fetch is counted."""

from __future__ import annotations

import base64
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.engine.worker import EngineWorker
from spyglass.server.app import create_app, served_by
from tests.scripted import ScriptedEngine
from tests.server.parts import PlainEndpoint, data_url, plain, running, wait_for

pytestmark = pytest.mark.slow


def test_many_may_wait_for_remote_pictures_but_few_unpack_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, unpacking, most = threading.Barrier(16), [], []
    monkeypatch.setattr("spyglass.server.parsing.RemoteImages", lambda **_: lambda address: bytes(waiting.wait(120)))

    class Counting(PlainEndpoint):
        def parse(self, body: Any, fetch: Any) -> Any:
            fetch("http://x")
            unpacking.append(1)
            most.append(len(unpacking))
            time.sleep(0.02)
            unpacking.pop()
            return super().parse(body, fetch)

    config = ServerConfig(grace_seconds=1, remote_images=True)
    worker = EngineWorker(ScriptedEngine(), max_live=100)
    endpoint = Counting(served_by(llm, config))
    with (
        running(create_app(llm, config, worker=worker, endpoints=[endpoint])) as server,
        ThreadPoolExecutor(16) as pool,
    ):
        answers = list(pool.map(server.post, [{"max_tokens": 1}] * 16))
        few = server.service.parsers.at_once
    assert {answer.status_code for answer in answers} == {200} and 1 < max(most) <= few


def test_who_waits_for_a_remote_picture_delays_nobody_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty servers that do not answer: text, pictures that are there and quick servers go on as if they were not."""
    answering = threading.Event()

    def fetch(address: str) -> bytes:
        if "slow" in address:
            assert answering.wait(120)
        return base64.b64decode(data_url().split(",")[1])

    monkeypatch.setattr("spyglass.server.parsing.RemoteImages", lambda **_: fetch)
    config = ServerConfig(grace_seconds=1, remote_images=True)
    worker = EngineWorker(ScriptedEngine(), max_live=100)
    with (
        running(create_app(llm, config, worker=worker, endpoints=[plain(llm, config)])) as server,
        ThreadPoolExecutor(40) as pool,
    ):
        slow = [pool.submit(server.post, {"images": ["http://slow"], "max_tokens": 1}) for _ in range(40)]
        wait_for(lambda: server.service.calls.num_taken == 40)
        for images in ([], [data_url()], ["http://quick"], ["http://quick", data_url()]):
            assert server.post({"images": images, "max_tokens": 1}).status_code == 200
        assert not any(answer.done() for answer in slow)
        answering.set()
        assert {answer.result(120).status_code for answer in slow} == {200}


def test_what_is_fetched_counts_as_held_until_it_is_unpacked(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, fetched = threading.Event(), []

    def remote(*, count: Any = abs, **_: Any) -> Any:
        def fetch(address: str) -> bytes:
            count(60_000)
            fetched.append(address)
            go_on.wait(120)
            return base64.b64decode(data_url().split(",")[1])

        return fetch

    monkeypatch.setattr("spyglass.server.parsing.RemoteImages", remote)
    config = ServerConfig(grace_seconds=1, remote_images=True, max_held_bytes=100_000)
    worker = EngineWorker(ScriptedEngine(), max_live=100)
    body = {"images": ["http://x"], "max_tokens": 1}
    with (
        running(create_app(llm, config, worker=worker, endpoints=[plain(llm, config)])) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(server.post, body)
        wait_for(lambda: fetched)
        refused = server.post(body)
        assert refused.status_code == 429 and "images" in refused.text
        assert server.service.held.total > 60_000
        go_on.set()
        assert first.result(120).status_code == 200
        wait_for(lambda: server.service.held.total == 0)
