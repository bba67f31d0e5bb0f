"""Many clients, some of them rude: each gets its own answer, and nobody holds the others."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.engine.worker import EngineWorker
from spyglass.server.app import create_app, served_by
from spyglass.server.run import bind
from tests.scripted import ScriptedEngine
from tests.server.parts import Live, PlainEndpoint, data_url, event, events, ids_of, plain, running, wait_for


@contextmanager
def scripted(llm: LLM, engine: ScriptedEngine, max_live: int = 100, **settings: Any) -> Iterator[Live]:
    """A server whose engine does as it is told."""
    config = ServerConfig(**{"grace_seconds": 1, **settings})
    worker = EngineWorker(engine, max_live=max_live)
    with running(create_app(llm, config, worker=worker, endpoints=[plain(llm)])) as server:
        yield server


def ask(server: Live, body: dict[str, Any]) -> socket.socket:
    """Send a request on a raw connection and leave it there."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    raw = socket.create_connection((host, int(port)), 30)
    head = (
        f"POST /plain HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    raw.sendall(head.encode() + content)
    return raw


def refuses(server: Live) -> bool:
    """Whether nobody listens any more."""
    try:
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 1).close()
    except OSError:
        return True
    return False


def holds_nothing(llm: LLM) -> bool:
    """No request has memory; what caches keep does not count, they give it back when asked."""
    stats = llm.engine.stats()
    return (stats.running, stats.waiting, stats.cache_share) == (0, 0, 0.0)


def test_a_stream_brings_what_the_whole_answer_holds(live: Live) -> None:
    body = {"ids": [0, 7, 8, 9], "max_tokens": 6, "n": 2}
    whole = live.post(body)
    assert whole.status_code == 200, whole.text
    stream = live.post({**body, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    found = events(stream.text)
    assert found[0] == {"id": stream.headers["x-request-id"]} and found[-1] == {"done": True}
    assert [ids_of(found, 0), ids_of(found, 1)] == whole.json()["answers"]
    assert len(whole.json()["answers"][0]) == 6


def test_tokens_are_sent_as_they_come(llm: LLM) -> None:
    """The engine takes its next step only when the token of the step before has arrived."""
    engine, arrived = ScriptedEngine(), threading.Semaphore(1)
    with scripted(llm, engine) as server:
        engine.before_step = lambda: arrived.acquire(timeout=120)
        with server.client.stream("POST", "/plain", json={"max_tokens": 10, "stream": True}) as answer:
            events = [arrived.release() for line in answer.iter_lines() if line.startswith("data: ")]
        assert len(events) >= 10


def test_many_at_once_get_what_each_gets_alone(live: Live) -> None:
    bodies = [{"ids": [0, *range(5, 6 + n)], "max_tokens": 1 + n % 7, "stream": n % 2 == 0} for n in range(24)]
    alone = [live.post({**body, "stream": False}).json()["answers"][0] for body in bodies]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(live.post, bodies))
    for body, answer, expected in zip(bodies, together, alone, strict=True):
        found = ids_of(events(answer.text)) if body["stream"] else answer.json()["answers"][0]
        assert found == expected


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_the_engine(stream: bool, llm: LLM) -> None:
    engine = ScriptedEngine(pause_s=0.01)
    with scripted(llm, engine) as server:
        raws = [ask(server, {"max_tokens": 100_000, "n": 2, "stream": stream}) for _ in range(3)]
        wait_for(lambda: len(engine.live) == 6)
        for raw in raws:
            raw.close()
        server.wait_until_idle()
        assert not engine.live


def test_who_leaves_the_real_engine_frees_its_memory(live: Live, llm: LLM) -> None:
    raw = ask(live, {"max_tokens": 4000, "stream": True})
    assert raw.recv(20)
    raw.close()
    live.wait_until_idle()
    pools, kept = llm.engine.allocator.pools, llm.engine.prefixes.spare_pages()
    assert {name: pool.num_used - kept[name] for name, pool in pools.items()} == dict.fromkeys(pools, 0)


def test_a_reader_who_does_not_read_holds_nobody(llm: LLM) -> None:
    engine = ScriptedEngine(lambda prompt, params: ["x" * 1000] * (params.max_tokens or 0))
    with scripted(llm, engine) as server:
        raws = [ask(server, {"max_tokens": 8000, "stream": True}) for _ in range(2)]
        wait_for(lambda: engine.steps > 3 and not engine.live)  # the engine is done, though nobody has read a byte
        assert server.post({"max_tokens": 3}).status_code == 200
        wait_for(lambda: server.service.calls.num_taken == 2)  # more is left to send than the system takes in
        for raw in raws:
            with raw.makefile("rb") as reader:
                found = events(read_to_done(reader))
            assert len(ids_of(found)) == 8000 and sum(len(item.get("text", "")) for item in found) == 8_000_000
            raw.close()


def test_a_reader_who_never_reads_is_given_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spyglass.server.connection.UNREAD_SECONDS", 0.3)
    engine = ScriptedEngine(lambda prompt, params: ["x" * 1000] * (params.max_tokens or 0))
    with scripted(llm, engine) as server:
        raw = ask(server, {"max_tokens": 8000, "stream": True})
        wait_for(lambda: engine.steps > 3 and not engine.live)
        server.wait_until_idle()
        raw.close()


def test_a_peer_that_is_gone_without_a_word_is_noticed() -> None:
    listening = bind("127.0.0.1", 0)
    listening.listen()
    with listening, socket.create_connection(listening.getsockname()) as ours, listening.accept()[0] as theirs:
        assert theirs.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert not ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert not hasattr(socket, "TCP_KEEPIDLE") or theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def read_to_done(reader: Any) -> str:
    """The body of a chunked stream."""
    while reader.readline().strip():
        pass
    text = b""
    while size := int(reader.readline(), 16):
        text += reader.read(size)
        reader.readline()
    return text.decode()


def test_more_than_may_wait_get_429_and_when_to_come_again(llm: LLM) -> None:
    engine = ScriptedEngine(pause_s=0.01)
    with scripted(llm, engine, max_live=2) as server:
        raws = [ask(server, {"max_tokens": 100_000, "stream": True}) for _ in range(2)]
        wait_for(lambda: len(engine.live) == 2)
        for stream in (True, False):
            refused = server.post({"max_tokens": 1, "stream": stream})
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert "under way" in refused.json()["plain_error"]["message"]
        raws.pop().close()
        wait_for(lambda: len(engine.live) == 1)
        assert server.post({"max_tokens": 1}).status_code == 200
        raws.pop().close()


def test_pictures_of_requests_under_way_take_only_so_much_memory(llm: LLM) -> None:
    engine = ScriptedEngine(pause_s=0.01)
    with scripted(llm, engine, max_held_bytes=1) as server:
        seeing = {"ids": [5], "images": [data_url()]}
        assert server.post({**seeing, "max_tokens": 1}).status_code == 200  # alone it may
        raw = ask(server, {**seeing, "max_tokens": 100_000, "stream": True})
        wait_for(lambda: engine.live)
        refused = server.post({**seeing, "max_tokens": 1})
        assert refused.status_code == 429 and "images" in refused.text
        raw.close()
        server.wait_until_idle()
        assert server.service.held.total == 0 and server.post({**seeing, "max_tokens": 1}).status_code == 200


def test_bodies_count_from_their_first_byte_until_they_are_parsed(llm: LLM) -> None:
    """Else two dozen large bodies that wait, or are being parsed, take gigabytes that nobody has counted."""
    text, go_on = "x" * (20 << 20), threading.Event()

    class Slow(PlainEndpoint):
        def parse(self, body: Any, fetch: Any) -> Any:
            go_on.wait(20)
            return super().parse({name: body[name] for name in body if name != "text"}, fetch)

    config = ServerConfig(grace_seconds=1, max_held_bytes=50 << 20)
    endpoint = Slow(served_by(llm, config))
    worker = EngineWorker(ScriptedEngine(), max_live=100)
    with (
        running(create_app(llm, config, worker=worker, endpoints=[endpoint])) as server,
        ThreadPoolExecutor(24) as pool,
    ):
        answers = [pool.submit(server.post, {"text": text, "max_tokens": 1}) for _ in range(24)]
        wait_for(lambda: sum(answer.done() for answer in answers) >= 22)
        assert 0 < server.service.held.total <= 50 << 20
        go_on.set()
        found = [answer.result(20) for answer in answers]
        refused = [answer for answer in found if answer.status_code == 429]
        assert len(refused) >= 22 and all(
            "bodies" in answer.text and answer.headers["retry-after"] for answer in refused
        )
        server.wait_until_idle()
        assert server.service.held.total == 0
        assert server.post({"text": text, "max_tokens": 1}).status_code == 200  # alone it may


def test_a_body_that_is_cut_or_too_long_gives_its_bytes_back(llm: LLM) -> None:
    with scripted(llm, ScriptedEngine(), max_body_bytes=10_000, max_held_bytes=100_000) as server:
        host, port = server.url.removeprefix("http://").split(":")
        head = b"POST /plain HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9000\r\n\r\n"
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(head + b"{" * 5000)
            wait_for(lambda: server.service.held.total == 5000)
        wait_for(lambda: server.service.held.total == 0)
        assert server.post({"text": "x" * 15_000}).status_code == 413
        assert server.post({"max_tokens": 1}).status_code == 200
        server.wait_until_idle()
        assert server.service.held.total == 0


def test_a_body_counts_while_a_thread_has_it_though_its_client_has_left(llm: LLM) -> None:
    go_on, begun = threading.Event(), threading.Event()

    class Slow(PlainEndpoint):
        def parse(self, body: Any, fetch: Any) -> Any:
            begun.set()
            go_on.wait(20)
            return super().parse(body, fetch)

    worker = EngineWorker(ScriptedEngine(), max_live=100)
    endpoint = Slow(served_by(llm, ServerConfig()))
    with running(create_app(llm, ServerConfig(grace_seconds=1), worker=worker, endpoints=[endpoint])) as server:
        raw = ask(server, {"max_tokens": 1})
        assert begun.wait(10)
        raw.close()
        wait_for(lambda: server.service.calls.num_taken == 0)
        assert server.service.held.total > 0
        go_on.set()
        wait_for(lambda: server.service.held.total == 0)


def test_a_stopped_server_leaves_nothing_running_for_who_does_not_read(llm: LLM) -> None:
    """Its last words cannot be delivered; then its connection is cut, and what it asked for ends with it."""
    engine = ScriptedEngine(lambda prompt, params: ["x" * 20_000] * (params.max_tokens or 0), pause_s=0.001)
    with scripted(llm, engine, grace_seconds=0) as server:
        raw = ask(server, {"max_tokens": 20_000, "stream": True})
        wait_for(lambda: engine.steps > 500)
        server.server.config.timeout_graceful_shutdown = 1
    assert not engine.live and server.service.calls.num_taken == 0
    raw.close()


def test_a_step_that_fails_ends_its_requests_in_words_and_the_server_goes_on(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(pause_s=0.005)
    with caplog.at_level(logging.CRITICAL, logger="spyglass"), scripted(llm, engine) as server:
        engine.faults = {engine.steps + 20}
        with ThreadPoolExecutor(2) as pool:
            whole, stream = pool.map(server.post, [{"max_tokens": 1000}, {"max_tokens": 1000, "stream": True}])
        assert whole.status_code == 500 and whole.json()["errors"] == ["the step failed"]
        assert stream.status_code == 200 and events(stream.text)[-2]["error"] == "the step failed"
        assert server.post({"max_tokens": 3}).json()["answers"] == [[1, 2, 3]]
        assert server.client.get("/health").status_code == 200
        assert 'spyglass:failed_steps_total{model_name="tiny"} 1.0' in server.client.get("/metrics").text


def test_a_step_of_the_real_engine_that_fails_costs_only_its_requests(
    live: Live, llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"ids": [0, 7, 8, 9], "max_tokens": 30}
    expected = live.post(body).json()
    run, steps = llm.engine.runner.run, []

    def fail_once(chunks: Any, *more: Any) -> Any:
        steps.append(len(chunks))
        if len(steps) == 10:
            raise RuntimeError("out of luck")
        return run(chunks, *more)

    monkeypatch.setattr(llm.engine.runner, "run", fail_once)
    with caplog.at_level(logging.CRITICAL), ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(live.post, [{**body, "stream": n > 0} for n in range(3)]))
        assert answers[0].status_code == 500 and "model failed" in answers[0].json()["errors"][0]
        assert all("model failed" in events(answer.text)[-2]["error"] for answer in answers[1:])
        assert live.post(body).json()["answers"] == expected["answers"]
    assert live.client.get("/health").status_code == 200
    assert holds_nothing(llm)


def test_a_fault_of_ours_is_told_without_its_inside(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL), scripted(llm, ScriptedEngine()) as server:
        for stream in (True, False):
            answer = server.post({"ids": [67], "stream": stream})
            assert answer.status_code == 500
            assert "67" not in answer.text and "logged" in answer.json()["plain_error"]["message"]
        assert server.post({"ids": [66]}).status_code == 400
        assert server.post({"max_tokens": 3}).status_code == 200


def test_a_fault_in_the_middle_of_a_stream_becomes_its_last_event(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def push(self: Any, index: int, delta: Any) -> bytes:
        if 3 in delta.token_ids:
            raise KeyError("a secret")
        return event({"ids": list(delta.token_ids)})

    monkeypatch.setattr("tests.server.parts.PlainReply.push", push)
    with caplog.at_level(logging.CRITICAL), scripted(llm, ScriptedEngine(pause_s=0.01)) as server:
        answer = server.post({"max_tokens": 1000, "stream": True})
        assert answer.status_code == 200 and "secret" not in answer.text
        assert answer.text.splitlines()[-2].startswith("data: ") and "event: error" in answer.text
        assert events(answer.text)[-1]["plain_error"]["status"] == 500
        server.wait_until_idle()


def test_a_stream_that_is_silent_says_that_it_lives(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spyglass.server.stream.QUIET_S", 0.05)
    with scripted(llm, ScriptedEngine(pause_s=0.3)) as server:
        answer = server.post({"max_tokens": 2, "stream": True})
        assert answer.text.count(": alive\n\n") >= 4
        assert ids_of(events(answer.text)) == [1, 2]


@pytest.mark.parametrize(("tokens", "cut"), [(40, False), (100_000, True)])
def test_stopping_lets_streams_end_or_ends_them_in_words(tokens: int, cut: bool, llm: LLM) -> None:
    engine = ScriptedEngine(pause_s=0.01)
    with scripted(llm, engine) as server, ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(server.post, {"max_tokens": tokens, "stream": n > 0}) for n in range(3)]
        wait_for(lambda: len(engine.live) == 3)
        server.server.should_exit = True
        wait_for(lambda: server.service.stopping and refuses(server))
        whole, *streams = [answer.result(10) for answer in answers]
        assert whole.status_code == (500 if cut else 200)
        for stream in streams:
            found = events(stream.text)
            assert found[-1] == {"done": True}
            assert found[-2]["error"] == ("the server is shutting down" if cut else None)
            assert cut or ids_of(found) == list(range(1, tokens + 1))
