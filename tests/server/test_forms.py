"""Grammars that take long to compile: whoever sends one is told, and nobody else notices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.engine.request import Structured
from spyglass.engine.structured.grammar import GrammarCompiler, GrammarMatcher
from spyglass.engine.structured.sandbox import GrammarSandbox
from spyglass.engine.worker import EngineWorker
from spyglass.errors import PromptError
from spyglass.server.app import create_app
from tests.scripted import ScriptedEngine
from tests.server.parts import Live, data_url, running, wait_for

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SAY = [{"role": "user", "content": "hi"}]
SEE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url()}}]}]
SLOW = "too slow"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "any", "schema": {"type": "integer"}}}


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Live]:
    worker = EngineWorker(ScriptedEngine(), max_live=100)
    with running(create_app(llm, ServerConfig(grace_seconds=1), worker=worker)) as live:
        yield live


def chat(server: Live, messages: Any = SAY, **more: Any) -> int:
    return int(server.post({"messages": messages, "max_tokens": 1, **more}, CHAT).status_code)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": SAY, "guided_regex": SLOW, "stream": True}),
        (MESSAGES, {"messages": SAY, "max_tokens": 5, "guided_regex": SLOW}),
        ("/v1/responses", {"input": "hi", "guided_regex": SLOW}),
    ],
)
def test_a_form_that_takes_too_long_is_a_400_that_says_what_to_do(
    server: Live, path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(sandbox: GrammarSandbox, kind: str, request: str) -> float:
        raise PromptError(f"the {kind} asked for takes more than 1 s to compile, so it is refused; make it smaller")

    monkeypatch.setattr(GrammarSandbox, "seconds", seconds)
    reply = server.post(body, path)
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400 and "takes more than 1 s to compile" in message and "make it smaller" in message


def test_neither_requests_nor_other_forms_wait_for_forms_that_take_long(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, waiting, few = threading.Event(), threading.Semaphore(0), server.service.parsers.at_once - 1
    seconds = GrammarSandbox.seconds

    def slow(trials: GrammarSandbox, kind: str, request: str) -> float:
        if "slow" in request:
            waiting.release()
            assert go_on.wait(60)
        return seconds(trials, kind, request)

    monkeypatch.setattr(GrammarSandbox, "seconds", slow)
    with ThreadPoolExecutor(8) as pool:
        held = [pool.submit(chat, server, guided_regex=f"slow{number}") for number in range(few)]
        assert all(waiting.acquire(timeout=30) for _ in held)
        assert chat(server, guided_regex="quick") == 200
        held += [pool.submit(chat, server, guided_regex=f"slow{number}") for number in range(few, 8)]
        wait_for(lambda: server.service.calls.num_taken == 8)
        assert chat(server) == 200 and chat(server, SEE) == 200
        assert not any(answer.done() for answer in held)
        go_on.set()
        assert {answer.result(60) for answer in held} == {200}


def test_forms_are_compiled_in_threads_of_their_own_and_never_in_that_of_the_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    begin = GrammarCompiler.begin

    def told(forms: GrammarCompiler, structured: Structured) -> GrammarMatcher:
        threads.append(threading.current_thread().name)
        return begin(forms, structured)

    monkeypatch.setattr(GrammarCompiler, "begin", told)
    with running(create_app(llm, ServerConfig(grace_seconds=1))) as live:
        for more in ({"guided_regex": "[ab]c"}, {"guided_choice": ["x", "y"], "n": 3}, {"response_format": SCHEMA}):
            reply = live.post({"messages": SAY, "max_tokens": 4, **more}, CHAT)
            assert reply.status_code == 200, reply.text
        assert [choice["message"]["content"] in ("x", "y") for choice in chosen(live)] == [True, True]
        wait_for(lambda: not live.service.readiness.starting)
    assert sorted(name.partition("_")[0] for name in threads) == ["asyncio", *["form"] * 4], "one is tried at the start"


def chosen(live: Live) -> list[Any]:
    asked = {"messages": SAY, "max_tokens": 4, "guided_choice": ["x", "y"], "n": 2}
    return list(live.post(asked, CHAT).json()["choices"])


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {f"p{n}": {"$ref": "#/$defs/d"} for n in range(5000)}, "$defs": {"d": {"title": "x" * 100_000}}},
        {"properties": {f"p{n}": {} for n in range(9000)}, "required": [f"q{n}" for n in range(100_000)]},
        {"properties": {"p": {"title": "x" * 300_000, "allOf": [False]}}},
    ],
    ids=["definitions for each", "many", "long"],
)
def test_tools_that_make_a_grammar_without_measure_are_refused(server: Live, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", **parameters}}}
    reply = server.post({"messages": SAY, "max_tokens": 1, "tools": [tool], "tool_choice": "required"}, CHAT)
    said = reply.json()["error"]["message"]
    # the tools are part of the prompt, whose length is bounded before they are measured
    assert reply.status_code == 400 and any(
        why in said for why in ("more than 262,144 characters", "prompt is too long")
    )
