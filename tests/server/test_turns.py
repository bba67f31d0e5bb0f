"""Costly work of one client is not before another's."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.engine.shares import ANYBODY, Client, Turns
from spyglass.engine.worker import EngineWorker
from spyglass.server.app import create_app, served_by
from tests.scripted import ScriptedEngine
from tests.server.parts import PlainEndpoint, running, wait_for

A, B, C = Client("a"), Client("b", 3), Client("c")


class Work:
    """Pieces of work that last until they are let go."""

    def __init__(self, most: int) -> None:
        self.turns, self.begun = Turns(most), []
        self._threads = ThreadPoolExecutor(50)
        self._ends: dict[str, threading.Event] = {}

    def submit(self, client: Client, name: str) -> Future[str]:
        self._ends[name] = threading.Event()

        def run() -> str:
            self.begun.append(name)
            assert self._ends[name].wait(120)
            return name

        return self.turns.submit(client, self._threads, run)

    def end(self, name: str) -> None:
        self._ends[name].set()


def test_who_has_nothing_running_begins_at_once_whatever_others_sent() -> None:
    work = Work(2)
    done = [work.submit(A, f"a{number}") for number in range(6)]
    wait_for(lambda: sorted(work.begun) == ["a0", "a1"])
    done += [work.submit(client, client.name) for client in (B, C)]
    wait_for(lambda: sorted(work.begun) == ["a0", "a1", "b", "c"])
    done.append(work.submit(Client("d"), "d"))  # more than twice as many are never at work
    for name in ("b", "c", "d", *(f"a{number}" for number in range(6))):
        work.end(name)
    assert sorted(one.result(120) for one in done) == sorted(work.begun)


def test_the_next_turn_is_of_who_has_fewest_per_share_and_of_one_client_the_oldest() -> None:
    work = Work(3)
    names = ["a0", "a1", "b0"]
    for name in names:
        work.submit({"a": A, "b": B}[name[0]], name)
    wait_for(lambda: sorted(work.begun) == names)
    for name in ("a2", "a3", "b1", "b2"):
        work.submit({"a": A, "b": B}[name[0]], name)
    for ended, begins in (("a0", "b1"), ("a1", "a2"), ("a2", "a3"), ("b0", "b2")):
        work.end(ended)
        wait_for(lambda name=begins: work.begun[-1] == name)
    for name in ("b1", "b2", "a3"):
        work.end(name)


def test_an_error_ends_a_turn_as_a_result_does() -> None:
    turns, threads = Turns(1), ThreadPoolExecutor(1)

    def fail() -> None:
        raise KeyError("x")

    failing = turns.submit(ANYBODY, threads, fail)
    assert turns.submit(ANYBODY, threads, lambda: 3).result(120) == 3
    assert isinstance(failing.exception(120), KeyError)
    with turns.of(ANYBODY):
        waiting = turns.submit(ANYBODY, threads, lambda: 4)
        assert not waiting.done()
    assert waiting.result(120) == 4


@pytest.mark.slow
def test_a_small_body_waits_for_no_large_one(llm: LLM) -> None:
    go_on, begun = threading.Event(), []

    class Slow(PlainEndpoint):
        def parse(self, body: Any, fetch: Any) -> Any:
            if "pad" in body:
                begun.append(1)
                assert go_on.wait(120)
            return super().parse({"max_tokens": 1}, fetch)

    config = ServerConfig(grace_seconds=1)
    worker = EngineWorker(ScriptedEngine(), max_live=100)
    app = create_app(llm, config, worker=worker, endpoints=[Slow(served_by(llm, config))])
    with running(app) as server, ThreadPoolExecutor(6) as pool:
        large = [pool.submit(server.post, {"pad": "x" * 40_000}) for _ in range(6)]
        most = app.state.service.parsers.at_once
        wait_for(lambda: len(begun) == most)
        assert server.post({"max_tokens": 1}).status_code == 200
        assert len(begun) == most and not any(answer.done() for answer in large)
        go_on.set()
        assert {answer.result(120).status_code for answer in large} == {200}
