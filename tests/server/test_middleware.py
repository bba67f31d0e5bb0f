"""What every request passes: ids, keys, statuses and bodies in the protocol's form, logs without contents."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2 as httpx
import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.server.app import create_app
from spyglass.server.log_lines import JsonLines
from tests.server.parts import Live, plain, running, wait_for

KEYS = ("sk-first", "sk-second")
ORIGIN = "https://pages.example"


@pytest.fixture(scope="module")
def guarded(llm: LLM) -> Iterator[Live]:
    config = ServerConfig(api_key=KEYS, model_name=("tiny", "alias"), cors_origin=(ORIGIN,))
    with running(create_app(llm, config, endpoints=[plain(llm, config)])) as server:
        yield server


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_in_either_header(key: str, guarded: Live) -> None:
    for headers in ({"authorization": f"Bearer {key}"}, {"authorization": f"bearer  {key}"}, {"x-api-key": key}):
        assert guarded.post({"max_tokens": 1}, headers=headers).status_code == 200
        assert guarded.client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {KEYS[0]}"},
        {"authorization": KEYS[0]},
        {"authorization": f"Bearer {KEYS[0]}x"},
        {"x-api-key": KEYS[0][:-1]},
        {"x-api-key": ""},
        {"x-api-key": b"\xff\xfe"},
    ],
    ids=str,
)
def test_anything_else_does_not(headers: dict[str, str], guarded: Live) -> None:
    answer = guarded.post({"max_tokens": 1}, headers=headers)
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert "API key" in answer.json()["plain_error"]["message"]
    for path in ("/v1/models", "/metrics", "/nothing"):
        assert guarded.client.get(path, headers=headers).status_code == 401


def test_the_page_and_the_probe_need_no_key(guarded: Live) -> None:
    for path in ("/", "/health", "/playground/plan?width=100&height=100"):
        assert guarded.client.get(path).status_code == 200, path


def test_a_request_keeps_its_id_and_gets_one_if_it_has_none(live: Live) -> None:
    made = {live.post({"max_tokens": 1}).headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    for given in ("mine-1.2:3_4", "x" * 128):
        answer = live.post({"max_tokens": 1}, headers={"x-request-id": given})
        assert answer.headers["x-request-id"] == answer.headers["request-id"] == answer.json()["id"] == given
    for given in ("x" * 129, "two words", "<b>", ""):
        assert live.post({"max_tokens": 1}, headers={"x-request-id": given}).headers["x-request-id"] != given
    refused = live.client.get("/nothing", headers={"x-request-id": "mine"})
    assert refused.status_code == 404 and refused.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/plain", 405),
        ("PUT", "/plain", 405),
        ("DELETE", "/plain", 405),
        ("OPTIONS", "/plain", 405),
        ("HEAD", "/plain", 405),
        ("POST", "/health", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/nothing", 404),
        ("POST", "/plain/", 404),
        ("POST", "/plain/more", 404),
        ("POST", "/v1/chat/nothing", 404),
        ("GET", "/v1/models/absent", 404),
        ("GET", "/v1/models/../../etc/passwd", 404),
        ("GET", "/%00%ff%fe", 404),
        ("HEAD", "/health", 200),
        ("HEAD", "/v1/models", 200),
    ],
)
def test_every_refusal_is_json_in_the_form_that_the_path_s_clients_read(
    method: str, path: str, status: int, live: Live
) -> None:
    answer = live.client.request(method, path)
    assert answer.status_code == status, answer.text
    if status == 405:
        assert answer.headers["allow"]
    if status != 200 and method != "HEAD":
        body = answer.json()
        assert ("plain_error" if path.startswith("/plain") else "error") in body
        told = body.get("error") or body["plain_error"]
        assert told["message"] and "Traceback" not in answer.text


def test_models_are_listed_under_every_name(guarded: Live) -> None:
    headers = {"x-api-key": KEYS[0]}
    listed = guarded.client.get("/v1/models", headers=headers).json()
    assert listed["object"] == "list" and [card["id"] for card in listed["data"]] == ["tiny", "alias"]
    card = guarded.client.get("/v1/models/alias", headers=headers).json()
    assert listed["first_id"] == "tiny" and listed["last_id"] == "alias" and listed["has_more"] is False
    assert card["id"] == "alias" and card["object"] == "model" and card["max_model_len"] > 0
    assert card["vision"] == guarded.client.get("/health").json()["vision"] == "yes"
    assert guarded.post({"model": "alias", "max_tokens": 1}, headers=headers).status_code == 200
    assert guarded.post({"model": "gpt-9", "max_tokens": 1}, headers=headers).status_code == 404


def test_a_page_of_an_allowed_origin_may_call_and_others_may_not(guarded: Live, live: Live) -> None:
    ask = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    allowed = guarded.client.options("/plain", headers=ask)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == ORIGIN
    refused = guarded.client.options("/plain", headers={**ask, "origin": "https://other.example"})
    assert "access-control-allow-origin" not in refused.headers
    answer = guarded.post({"max_tokens": 1}, headers={"origin": ORIGIN})
    assert answer.status_code == 401 and answer.headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-origin" not in live.post({"max_tokens": 1}, headers={"origin": ORIGIN}).headers


def test_the_log_tells_of_requests_and_never_what_is_in_them(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    secret, names = "do-not-log-me", ["told-1", "told-2", "told-3"]
    first, second, third = ({"x-request-id": name} for name in names)
    with caplog.at_level(logging.INFO, logger="spyglass.server"):
        live.post({"ids": [0, 7, 8], "max_tokens": 2, "user": secret, "odd": True}, headers=first)
        live.post({"ids": secret}, headers=second)
        live.post({"max_tokens": 1}, path=f"/plain?key={secret}", headers={**third, "x-api-key": secret})
        wait_for(lambda: len(logged(caplog, names)) == 3)
    assert secret not in json.dumps(
        [json.loads(JsonLines().format(record)) for record in caplog.records if record.name.startswith("spyglass")]
    )
    lines = logged(caplog, names)
    expected = {"method": "POST", "path": "/plain", "status": 200, "answers": 1, "prompt_tokens": 3}
    assert expected.items() <= lines[0].items()
    assert lines[0]["completion_tokens"] == 2 and lines[0]["ignored"] == ["user"] and lines[0]["finish"] == ["length"]
    assert 0 < lines[0]["parse_s"] <= lines[0]["first_token_s"] <= lines[0]["total_s"]
    assert [line.get("malformed_tool_call") for line in lines] == [True, None, None]
    assert [line["status"] for line in lines] == [200, 400, 200] and lines[1]["error"] == "PromptError"


def test_who_left_is_told_from_who_was_answered(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="spyglass.server"):
        with pytest.raises(httpx.ReadTimeout):
            live.post({"max_tokens": 4000}, timeout=0.3, headers={"x-request-id": "hasty"})
        wait_for(lambda: logged(caplog, ["hasty"]))
    (line,) = logged(caplog, ["hasty"])
    assert line["status"] == 499 and line["client_left"] is True


def logged(caplog: pytest.LogCaptureFixture, names: Sequence[str]) -> list[dict[str, Any]]:
    """What the log says of requests with these ids, in their order."""
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    found = {line["request_id"]: line for line in lines if "request_id" in line}
    return [found[name] for name in names if name in found]
