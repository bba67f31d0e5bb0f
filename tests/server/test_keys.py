"""Keys with names: rates a minute and their headers, numbers and logs by name, places of their own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from spyglass.config.keys import read_api_keys
from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.engine.shares import ANYBODY, Client
from spyglass.errors import CapacityError, OverloadedError
from spyglass.server.app import create_app
from spyglass.server.keys import Caller, KeyRing, sender_of
from tests.server.parts import Live, data_url, events, plain, running, wait_for

KEYS = (
    "alice=sk-a requests=4 tokens=100 images=2",
    "bob=sk-b",
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def caller(clock: Clock, **rates: int) -> Caller:
    text = " ".join(["x=y", *(f"{name}={value}" for name, value in rates.items())])
    return Caller(read_api_keys([text])[0], clock)


def told(one: Caller) -> dict[str, str]:
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in one.headers()}


def test_a_rate_is_a_minutes_worth_that_fills_evenly() -> None:
    clock = Clock()
    one = caller(clock, requests=4)
    for left in (3, 2, 1, 0):
        one.take(requests=1)
        assert told(one)["remaining-requests"] == str(left)
    assert told(one) == {"limit-requests": "4", "remaining-requests": "0", "reset-requests": "1m0s"}
    with pytest.raises(OverloadedError, match="4 requests a minute") as refused:
        one.take(requests=1)
    assert refused.value.retry_after_s == pytest.approx(15)
    clock.now += 15
    one.take(requests=1)
    clock.now += 1000
    assert told(one) == {"limit-requests": "4", "remaining-requests": "4", "reset-requests": "0ms"}


def test_tokens_are_counted_as_they_may_become_and_settled_as_they_were() -> None:
    clock = Clock()
    one = caller(clock, tokens=100)
    one.take(tokens=8000)  # longer than a minute's worth: alone, when nothing else has been taken
    with pytest.raises(OverloadedError):
        one.take(tokens=1)
    one.give_back(8000 - 40)
    assert told(one)["remaining-tokens"] == "60"
    one.take(tokens=60)
    one.give_back(60 - 260)
    with pytest.raises(OverloadedError) as refused:  # 200 below
        one.take(tokens=1)
    assert refused.value.retry_after_s == pytest.approx(201 * 0.6)


def test_all_of_a_request_is_counted_or_nothing() -> None:
    one = caller(Clock(), tokens=100, images=2)
    one.take(tokens=10, images=1)
    with pytest.raises(OverloadedError, match="2 images a minute"):
        one.take(tokens=10, images=2)
    assert told(one)["remaining-tokens"] == "90"
    with pytest.raises(CapacityError, match="send fewer"):
        one.take(images=3)
    Caller().take(requests=10**9, tokens=10**9, images=10**9)


@pytest.fixture
def shared(llm: LLM) -> Iterator[Live]:
    ring = KeyRing(read_api_keys(KEYS), Clock())
    app = create_app(llm, ServerConfig(grace_seconds=1), endpoints=[plain(llm)], keys=ring)
    with running(app) as server:
        yield server


def ask(live: Live, key: str, **body: Any) -> Any:
    return live.post({"max_tokens": 4, **body}, headers={"authorization": f"Bearer {key}"})


def test_a_used_up_rate_is_a_429_that_says_when_and_moves_nobody_else(shared: Live) -> None:
    first = ask(shared, "sk-a", ids=[0, 5, 6])
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "4" and first.headers["x-ratelimit-remaining-requests"] == "3"
    assert first.headers["x-ratelimit-remaining-tokens"] == str(100 - 3 - 4), "what it may come to"
    stream = ask(shared, "sk-a", ids=[0, 5, 6], max_tokens=2, stream=True)
    assert events(stream.text)[-1] == {"done": True} and stream.headers["x-ratelimit-limit-images"] == "2"
    assert ask(shared, "sk-a", images=[data_url()] * 3).status_code == 400
    assert ask(shared, "sk-a", ids=[0, 5], max_tokens=60).status_code == 200, "tokens that were not drawn came back"
    refused = ask(shared, "sk-a")
    assert refused.status_code == 429 and refused.headers["retry-after"] == "15"
    assert "4 requests a minute" in refused.json()["plain_error"]["message"]
    for _ in range(6):
        answer = ask(shared, "sk-b")
        assert answer.status_code == 200 and not any(name.startswith("x-ratelimit") for name in answer.headers)
    assert ask(shared, "sk-a" + "x").status_code == 401


def test_numbers_and_logs_have_the_names_of_keys_and_never_a_key(
    shared: Live, caplog: pytest.LogCaptureFixture
) -> None:
    def names() -> list[str | None]:
        told = [record.__dict__.get("request") for record in caplog.records]
        return [request.get("key") for request in told if request is not None]

    with caplog.at_level(logging.INFO, "spyglass.server"):
        for count, (key, ids) in enumerate([("sk-a", [0, 5, 6]), ("sk-b", [0, 5]), ("sk-c", [0])], start=1):
            ask(shared, key, ids=ids)
            wait_for(lambda lines=count: len(names()) == lines)  # a line comes behind the last byte of its answer
    text = shared.client.get("/metrics", headers={"x-api-key": "sk-b"}).text
    assert 'spyglass:key_requests_total{key="alice",status="200"} 1.0' in text
    assert 'spyglass:key_prompt_tokens_total{key="bob"} 2.0' in text
    assert 'spyglass:key_generation_tokens_total{key="alice"} 4.0' in text
    assert 'spyglass:key_time_to_first_token_seconds_count{key="alice"} 1.0' in text
    assert names()[:3] == ["alice", "bob", None]
    assert not any(f"sk-{one}" in text + caplog.text for one in "abc")


def test_a_key_that_floods_leaves_the_places_of_others(llm: LLM) -> None:
    """Eight run and two may wait; a flood never has all ten, so another key's request is taken at once."""
    config = ServerConfig(api_key=(KEYS[1], "carol=sk-c"), max_waiting=2, grace_seconds=0)
    with running(create_app(llm, config, endpoints=[plain(llm)])) as live:
        service = live.service
        bob = service.keys.clients[0]
        while service.calls.has_room(bob):
            service.calls.take(bob)
        assert ask(live, "sk-b").status_code == 429
        assert ask(live, "sk-c").status_code == 200
        service.calls.take(bob, -service.calls.num_taken)
        assert ask(live, "sk-b").status_code == 200


def test_bodies_are_read_in_turn_by_key_or_else_by_address() -> None:
    alice = Client("alice", 3)
    assert sender_of({"client": ("10.0.0.1", 5)}, alice) is alice
    assert sender_of({"client": ("10.0.0.1", 5)}, ANYBODY) == sender_of({"client": ("10.0.0.1", 6)}, ANYBODY)
    assert sender_of({"client": ("10.0.0.1", 5)}, ANYBODY) != sender_of({"client": ("10.0.0.2", 5)}, ANYBODY)
    near, far = ("2001:db8::a:b:c:d", 5, 0, 0), ("2001:db8:0:1::a", 5, 0, 0)
    assert sender_of({"client": near}, ANYBODY) == Client("2001:db8::/64") != sender_of({"client": far}, ANYBODY)
    assert sender_of({"client": ("::ffff:10.0.0.1", 5)}, ANYBODY) == Client("10.0.0.1"), "a socket of both families"
    assert sender_of({"client": ("a:proxy says%this", 0)}, ANYBODY) == Client("a:proxy says%this")
    assert sender_of({"client": None}, ANYBODY) is ANYBODY, "a socket of this machine"
