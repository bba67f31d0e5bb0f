"""`/health` is believed by load balancers and `/metrics` by people at night: both tell the truth."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.engine import Engine
from spyglass.engine.llm import LLM
from spyglass.engine.stats import EngineStats
from spyglass.engine.worker import EngineWorker
from spyglass.errors import CapacityError, OverloadedError, PromptError
from spyglass.model import VisionLanguageModel
from spyglass.server.app import create_app
from tests.scripted import ScriptedEngine
from tests.server.parts import Live, data_url, plain, running, wait_for

EVERYTHING = {"text", "images", "structured answers"}


@contextmanager
def held(llm: LLM, engine: ScriptedEngine) -> Iterator[Live]:
    worker = EngineWorker(engine, max_live=100)
    app = create_app(llm, ServerConfig(grace_seconds=0), worker=worker, endpoints=[plain(llm)])
    with running(app, ready=False) as server:
        yield server


def health(server: Live) -> tuple[int, dict[str, Any]]:
    answer = server.client.get("/health")
    return answer.status_code, answer.json()


def test_ready_means_a_token_with_every_feature_and_tells_what_runs(live: Live, llm: LLM) -> None:
    status, body = health(live)
    assert status == 200 and body["status"] == "ok"
    assert body["features"] == dict.fromkeys(EVERYTHING, "ok")
    assert body["model"] == "tiny" and body["device"] == "cpu" and body["dtype"] == "float32" and body["version"]
    assert body["ops"] == dict(llm.loaded.model.options.build.ops.chosen) and len(body["ops"]) > 10


def test_a_server_is_not_ready_before_each_feature_has_drawn_a_token(llm: LLM) -> None:
    gate = threading.Semaphore(0)

    class Waiting(ScriptedEngine):
        def step(self, *more: Any) -> Any:
            gate.acquire()
            return super().step(*more)

    with held(llm, Waiting()) as server:
        for tried in range(len(EVERYTHING)):
            wait_for(lambda tried=tried: list(health(server)[1]["features"].values()).count("ok") == tried)
            assert health(server)[0] == 503 and health(server)[1]["status"] == "starting"
            assert server.client.get("/v1/models").status_code == 200
            gate.release()
        wait_for(lambda: health(server)[0] == 200)


def test_a_feature_that_fails_is_named_and_the_others_go_on(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    class Blind(ScriptedEngine):
        def submit(self, request: Any, **adapter: Any) -> int:
            if request.prompt.plans:
                raise PromptError("no attention for images is built")
            return super().submit(request)

    with caplog.at_level(logging.CRITICAL), held(llm, Blind()) as server:
        wait_for(lambda: health(server)[1]["status"] == "failing")
        status, body = health(server)
        assert status == 503 and body["features"]["images"] == "no attention for images is built"
        assert body["features"]["text"] == "ok"
        assert server.post({"max_tokens": 2}).status_code == 200
        refused = server.post({"max_tokens": 2, "images": [data_url()]})
        assert refused.status_code == 400 and "no attention" in refused.text


def test_a_feature_that_ends_without_a_token_is_not_ready(llm: LLM) -> None:
    class Silent(ScriptedEngine):
        def step(self, *more: Any) -> Any:
            return [replace(d, output=replace(d.output, token_ids=())) if d.output else d for d in super().step(*more)]

    with held(llm, Silent()) as server:
        wait_for(lambda: health(server)[1]["status"] == "failing")
        assert health(server)[0] == 503 and health(server)[1]["features"]["text"] == "no token was drawn"


def test_a_server_that_is_full_while_it_starts_tries_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spyglass.server.readiness.AGAIN_S", 0.01)
    worker = EngineWorker(ScriptedEngine(), max_live=100)
    submit, refused = worker.submit, []

    def full_at_first(*call: Any) -> Any:
        if len(refused) < 3:
            refused.append(call)
            raise OverloadedError("no place")
        return submit(*call)

    monkeypatch.setattr(worker, "submit", full_at_first)
    app = create_app(llm, ServerConfig(grace_seconds=0), worker=worker, endpoints=[plain(llm)])
    with running(app, ready=False) as server:
        wait_for(lambda: health(server)[0] == 200)
        assert health(server)[1]["features"] == dict.fromkeys(EVERYTHING, "ok") and len(refused) == 3


def test_a_trial_that_breaks_is_a_named_failure_in_the_log(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedEngine):
        def submit(self, request: Any, **adapter: Any) -> int:
            if request.prompt.plans:
                raise KeyError("a secret")
            return super().submit(request)

    with caplog.at_level(logging.ERROR), held(llm, Broken()) as server:
        wait_for(lambda: health(server)[1]["status"] == "failing")
        features = health(server)[1]["features"]
        assert "KeyError" in features["images"] and "secret" not in features["images"]
        assert {features[name] for name in EVERYTHING - {"images"}} == {"ok"}
    assert any(record.exc_info and record.exc_info[0] is KeyError for record in caplog.records)


def test_steps_that_only_fail_show_and_recovery_shows_too(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    with caplog.at_level(logging.CRITICAL), held(llm, engine) as server:
        wait_for(lambda: health(server)[0] == 200)
        engine.faults = set(range(engine.steps + 1, engine.steps + 4))
        assert [server.post({}).status_code for _ in range(3)] == [500] * 3
        assert health(server)[1]["status"] == "failing" and health(server)[0] == 503
        assert server.post({}).status_code == 200
        assert health(server)[0] == 200


def test_a_step_that_does_not_end_shows_and_is_logged_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("spyglass.server.readiness.STALL_S", 0.1)
    engine = ScriptedEngine()
    with caplog.at_level(logging.ERROR), held(llm, engine) as server:
        wait_for(lambda: health(server)[0] == 200)
        engine.pause_s = 0.5
        asking = threading.Thread(target=server.post, args=({"max_tokens": 1},))
        asking.start()
        wait_for(lambda: health(server)[1]["status"].startswith("stalled"))
        asking.join()
        assert health(server)[0] == 200
    assert [record.getMessage() for record in caplog.records].count(
        "a step of the engine has taken more than 0.1 s"
    ) == 1


def number(text: str, name: str, **labels: str) -> float:
    """One sample; all labels but the model's must be as given."""
    for line in text.splitlines():
        found = re.fullmatch(r"([\w:]+)\{(.*)\} (\S+)", line)
        if found and found[1] == name:
            given = dict(re.findall(r'(\w+)="([^"]*)"', found[2]))
            if given.pop("model_name", "tiny") == "tiny" and given == labels:
                return float(found[3])
    return 0.0


def test_numbers_grow_by_what_was_done(live: Live) -> None:
    before = live.client.get("/metrics").text
    live.post({"ids": [0, 5, 6], "max_tokens": 7, "n": 2})
    live.post({"ids": [0, 5, 6, 7], "max_tokens": 2, "stream": True, "images": [data_url()]})
    live.post({"ids": "refused"})
    live.wait_until_idle()
    picture = live.post({"ids": [0, 5, 6, 7], "images": [data_url()], "count": True}).json()["tokens"] - 4
    plain = {"path": "/plain", "status": "200"}  # counted once the reply is out
    wait_for(lambda: number(live.client.get("/metrics").text, "spyglass:http_requests_total", **plain) >= 3)
    after = live.client.get("/metrics").text
    for name, grown, labels in (
        ("vllm:prompt_tokens_total", 3 + 4 + picture, {}),
        ("vllm:generation_tokens_total", 16, {}),
        ("spyglass:computed_tokens_total", 2 * (3 + 6) + 4 + picture + 1, {}),
        ("vllm:request_success_total", 3, {"finished_reason": "length"}),
        ("vllm:time_to_first_token_seconds_count", 2, {}),
        ("vllm:e2e_request_latency_seconds_count", 2, {}),
        ("spyglass:images_total", 1, {}),
        ("spyglass:image_tokens_total", picture, {}),
        ("spyglass:pictures_total", 1, {}),
        ("spyglass:picture_tokens_total", picture, {}),
        ("spyglass:http_requests_total", 3, {"path": "/plain", "status": "200"}),
        ("spyglass:http_requests_total", 1, {"path": "/plain", "status": "400"}),
    ):
        assert number(after, name, **labels) - number(before, name, **labels) == grown, name


def test_gauges_show_what_is_under_way_and_fall_back_to_nothing(live: Live) -> None:
    names = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "spyglass:num_requests_in_flight")
    with live.client.stream("POST", "/plain", json={"max_tokens": 4000, "stream": True}) as answer:
        lines = answer.iter_lines()  # dropped, it would hang up
        next(lines)
        wait_for(lambda: number(live.client.get("/metrics").text, names[1]) > 0)
        text = live.client.get("/metrics").text
        assert number(text, names[0]) == number(text, names[2]) == 1 and number(text, names[1]) <= 1
    live.wait_until_idle()
    assert [number(live.client.get("/metrics").text, name) for name in names] == [0, 0, 0]


def test_strangers_cannot_make_up_series(live: Live) -> None:
    for path in ("/made-up", "/v1/models/made-up", "/plain/made-up"):
        live.client.get(path)
    assert "made-up" not in live.client.get("/metrics").text


def test_two_servers_in_one_process_count_apart(live: Live, llm: LLM) -> None:
    with held(llm, ScriptedEngine()) as other:
        wait_for(lambda: health(other)[0] == 200)
        other.post({"max_tokens": 5})
        wait_for(lambda: number(other.client.get("/metrics").text, "vllm:generation_tokens_total") == 5)


def test_what_caches_found_is_counted(llm: LLM, tiny_folder: Path) -> None:
    cached = LLM(tiny_folder, device="cpu", dtype="float32", numerics="plain", max_sequences=8)
    body = {"ids": [0, *range(5, 200)], "images": [data_url()], "max_tokens": 3}
    with running(create_app(cached, ServerConfig(), endpoints=[plain(cached)])) as server:
        answers = []
        for _ in range(2):
            before, answer = server.client.get("/metrics").text, server.post(body)
            answers.append(answer.json()["answers"])
            server.wait_until_idle()
        after = server.client.get("/metrics").text
    assert answers[0] == answers[1]
    found = {name: number(after, name) - number(before, name) for name in (
        "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total"
    )}  # fmt: skip
    assert 0 < found["vllm:prefix_cache_hits_total"] < found["vllm:prefix_cache_queries_total"]
    assert found["vllm:prefix_cache_queries_total"] == found["vllm:prompt_tokens_total"]


def test_what_the_engine_counts_of_caches_and_masks_is_told(llm: LLM) -> None:
    counts = {"prefix_bytes": 11, "image_bytes": 12, "prefix_evictions": 13, "image_evictions": 14, "waiting": 15}

    class Counting(ScriptedEngine):
        def stats(self) -> EngineStats:
            return replace(super().stats(), mask_share=0.25, **counts)

    with held(llm, Counting()) as server:
        text = server.client.get("/metrics").text
    assert [number(text, f"spyglass:{name}") for name in (
        "prefix_cache_bytes", "image_cache_bytes", "prefix_cache_evictions_total", "image_cache_evictions_total",
        "num_requests_waiting_for_memory", "answers_without_memory", "grammar_mask_overlap_ratio",
        "grammar_mask_hidden_ratio",
    )] == [11, 12, 13, 14, 15, 15, 0.25, 0.25]  # fmt: skip


@pytest.mark.parametrize("error", [None, CapacityError("no memory for graphs")])
def test_a_gpu_captures_its_steps_before_it_is_ready(
    error: CapacityError | None, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[bool] = []

    def capture(engine: Engine, model: VisionLanguageModel, *, adapters: bool) -> None:
        captured.append(adapters)
        if error is not None:
            raise error

    monkeypatch.setattr("spyglass.server.readiness.captures_ahead", lambda engine: True)
    monkeypatch.setattr("spyglass.server.readiness.capture_steps", capture)
    with held(llm, ScriptedEngine()) as server:
        wait_for(lambda: health(server)[1]["status"] != "starting")
        status, body = health(server)
        assert captured == [False]
        assert (status, body["features"]["captured steps"]) == ((200, "ok") if error is None else (503, str(error)))
