"""`/openapi.json` and `/docs`: everything that is served and read is described, by the tables that read it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.errors import PromptError
from spyglass.server.app import create_app
from spyglass.server.openapi import describe_api, docs_page
from spyglass.server.protocols.described import DESCRIBED
from spyglass.server.protocols.endpoints import make_endpoints
from spyglass.server.protocols.fields import Fields
from tests.server.parts import Live, running
from tests.server.protocol_parts import served_of

ENDPOINTS = {endpoint.path: endpoint for endpoint in make_endpoints(served_of(strict_fields=True))}
TOLD = describe_api(list(ENDPOINTS.values()))


def tables(fields: Fields) -> Iterator[Fields]:
    yield fields
    for inner in fields.inner.values():
        for one in (inner,) if isinstance(inner, Fields) else inner:
            yield from tables(one)


def body_schema(path: str) -> dict[str, Any]:
    found: dict[str, Any] = TOLD["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return found


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_field_that_is_read_is_described_and_no_other(path: str) -> None:
    names = {name for table in tables(ENDPOINTS[path].fields) for name in table.read}
    assert names <= set(DESCRIBED), "describe it in protocols/described.py"
    schema = body_schema(path)
    fields = ENDPOINTS[path].fields
    assert set(schema["properties"]) == fields.read | set(fields.neutral)
    assert set(schema["x-ignored"]) == fields.ignored
    for name in fields.inner:
        assert name in fields.read


def test_no_description_is_left_over() -> None:
    used = {name for one in ENDPOINTS.values() for table in tables(one.fields) for name in table.read}
    inner_only = {"return_token_strs", "tokens", "text"}
    assert set(DESCRIBED) - used <= inner_only


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_strict_server_refuses_what_is_not_described(path: str) -> None:
    with pytest.raises(PromptError, match=r"surprise is not a known field"):
        ENDPOINTS[path].parse({"surprise": 1}, None)


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "surprise": 1}]}, "messages[]"),
        ("/v1/chat/completions", {"messages": [], "stream_options": {"surprise": 1}}, "stream_options"),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": "a", "surprise": 1}]},
            "messages[]",
        ),
        ("/v1/responses", {"input": "a", "reasoning": {"surprise": 1}}, "reasoning"),
        ("/v1/completions", {"prompt": "a", "stream_options": {"surprise": 1}}, "stream_options"),
        ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "a", "surprise": 1}]}, "messages[]"),
        ("/api/generate", {"model": "tiny", "prompt": "a", "options": {"surprise": 1}}, "options"),
    ],
)
def test_inner_objects_are_read_by_the_tables_they_are_described_by(path: str, body: Any, place: str) -> None:
    with pytest.raises(PromptError, match=r"surprise is not a known field.*known are") as refused:
        ENDPOINTS[path].parse(body, None)
    known = set(str(refused.value).split("known are ")[1].split(", "))
    field = body_schema(path)["properties"][place.removesuffix("[]")]
    told = field["items"] if place.endswith("[]") else field
    assert known == {*told["properties"], *told["x-ignored"]}


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Live]:
    config = ServerConfig(grace_seconds=1, api_key=("k",), model_name=("tiny",))
    with running(create_app(llm, config)) as live:
        yield live


def test_every_route_is_described_and_every_description_is_served(served: Live) -> None:
    told = served.client.get("/openapi.json").json()
    routes = {re.sub(r":\w+", "", route.path) for route in served.app.routes}  # type: ignore[attr-defined]
    optional = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    assert routes | optional == set(told["paths"])
    key = {"x-api-key": "k"}
    for path, methods in told["paths"].items():
        if "get" in methods and "{" not in path and path != "/playground/plan":
            assert served.client.get(path, headers=key).status_code == 200, path
        if "post" in methods and path not in optional:
            assert served.client.post(path, headers=key, json=[]).status_code == 400, path


def test_the_page_needs_nothing_from_elsewhere_and_holds_every_path(served: Live) -> None:
    answer = served.client.get("/docs")
    assert answer.status_code == 200 and "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.text == docs_page(served.client.get("/openapi.json").json())
    assert not re.search(r"<script|src=|https?://", answer.text)
    for path in TOLD["paths"]:
        assert f"{path}</code>" in answer.text
    assert "<code>messages[].content</code>" in answer.text and "<code>options.num_predict</code>" in answer.text


def test_versions_and_properties_are_told(served: Live, llm: LLM) -> None:
    key = {"x-api-key": "k"}
    assert served.client.get("/version").status_code == 401
    told = served.client.get("/props", headers=key).json()
    assert told["default_generation_settings"]["n_ctx"] == llm.engine.max_length
    assert told["modalities"] == {"vision": True, "audio": False} and told["model_alias"] == "tiny"
    assert re.fullmatch(r"\d+\.\d+\.\d+", served.client.get("/api/version", headers=key).json()["version"])
    (card,) = served.client.get("/api/tags", headers=key).json()["models"]
    assert card["name"] == "tiny:latest" and card["size"] == llm.loaded.report.nbytes > 0
