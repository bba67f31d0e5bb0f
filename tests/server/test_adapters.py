"""Adapters over HTTP: chosen by the model's name, each request its own, tried before the server is ready."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.errors import ConfigError
from spyglass.lora.write import write_adapter
from spyglass.server.app import create_app
from tests.adapter_parts import random_adapter, shapes_of
from tests.server.parts import Live, data_url, plain, running

pytestmark = pytest.mark.slow
NAMES = ("words", "sees")


@pytest.fixture(scope="module")
def adapted(tiny_folder: Path, llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder, groups = (
        tmp_path_factory.mktemp("adapters"),
        {"words": ["attention", "shared"], "sees": ["tower", "aligner"]},
    )
    for seed, name in enumerate(NAMES):
        adapter = random_adapter(shapes_of(llm.loaded.model), groups[name], rank=4, seed=seed, size=1.0)
        write_adapter(folder / name, adapter)
    folders = {name: folder / name for name in NAMES}
    return LLM(tiny_folder, device="cpu", dtype="float32", numerics="plain", max_sequences=8, adapters=folders)


@pytest.fixture(scope="module")
def server(adapted: LLM) -> Iterator[Live]:
    with running(create_app(adapted, ServerConfig(), endpoints=[plain(adapted)])) as live:
        yield live


def test_the_model_s_name_chooses_the_adapter(server: Live, adapted: LLM) -> None:
    body = {"ids": [0, 77, 78, 79], "images": [data_url()], "max_tokens": 8}
    found = {name: server.post({**body, "model": name}).json()["answers"][0] for name in ("tiny", *NAMES)}
    assert len(set(map(tuple, found.values()))) == 3
    assert server.post(body).json()["answers"][0] == found["tiny"]
    listed = server.client.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in listed] == [("tiny", None), ("words", "tiny"), ("sees", "tiny")]
    assert server.post({**body, "model": "absent"}).status_code == 404


def test_each_adapter_is_tried_before_the_server_is_ready(server: Live) -> None:
    features = server.client.get("/health").json()["features"]
    assert {name: features[f"adapter {name}"] for name in NAMES} == dict.fromkeys(NAMES, "ok")


def test_an_adapter_may_not_be_called_like_the_model(adapted: LLM) -> None:
    with pytest.raises(ConfigError, match="'words' is both"):
        create_app(adapted, ServerConfig(model_name=("words",)))
