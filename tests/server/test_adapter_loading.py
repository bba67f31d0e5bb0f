"""Adapters that come and go over HTTP: nobody else notices, a name always means what was loaded last under it."""

from __future__ import annotations

import json
import logging
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.engine.request import SamplingParams
from spyglass.errors import ConfigError
from spyglass.layers.linear import Linear
from spyglass.lora.write import write_adapter
from spyglass.server.app import create_app
from tests.adapter_parts import random_adapter, shapes_of
from tests.server.parts import Live, data_url, events, ids_of, plain, running, wait_for

pytestmark = pytest.mark.slow
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ASKED = {"ids": [0, 77, 78, 79], "max_tokens": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, llm: LLM) -> Path:
    """Adapters in folders, sound and broken ones; one is elsewhere."""
    folder = tmp_path_factory.mktemp("adapters")
    groups: dict[str, Any] = {"one": ["attention", "shared"], "two": ["attention"], "sees": ["tower", "aligner"]}
    loud = random_adapter(shapes_of(llm.loaded.model), ["tower"], rank=4, size=1e38)  # finite; what it gives is not
    write_adapter(folder / "loud", loud)
    for seed, name in enumerate((*groups, "cut", "../elsewhere")):
        kinds = groups.get(name, ["attention"])
        write_adapter(folder / name, random_adapter(shapes_of(llm.loaded.model), kinds, rank=4, seed=seed, size=1.0))
    tensors = folder / "cut" / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    (folder / "link").symlink_to(folder / "../elsewhere")
    (folder / "circle").symlink_to(folder / "circle")
    bogus = folder / "bogus"
    bogus.mkdir()
    config = json.loads((folder / "two" / "adapter_config.json").read_text())
    (bogus / "adapter_config.json").write_text(json.dumps(config | {"r": 9, "rank_pattern": {}}))
    (bogus / "adapter_model.safetensors").write_bytes((folder / "two" / "adapter_model.safetensors").read_bytes())
    return folder


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> LLM:
    return LLM(tiny_folder, device="cpu", dtype="float32", numerics="plain", max_sequences=8, cache_bytes=120 << 20)


@pytest.fixture(scope="module")
def open_to_load(model: LLM, root: Path) -> Iterator[Live]:
    config = ServerConfig(allow_adapter_loading=True, adapter_root=str(root))
    with running(create_app(model, config, endpoints=[plain(model)])) as live:
        yield live


@pytest.fixture
def server(open_to_load: Live, model: LLM) -> Iterator[Live]:
    """Without adapters before and after."""
    yield open_to_load
    for name in names(open_to_load)[1:]:
        assert unload(open_to_load, name) == 200
    wait_for(lambda: not adapter_ids(model))


def load(live: Live, name: str, path: str | Path) -> int:
    return int(live.post({"lora_name": name, "lora_path": str(path)}, LOAD).status_code)


def unload(live: Live, name: str) -> int:
    return int(live.post({"lora_name": name}, UNLOAD).status_code)


def names(live: Live) -> list[str]:
    return [card["id"] for card in live.client.get("/v1/models").json()["data"]]


def adapter_ids(llm: LLM) -> set[int]:
    """Ids of those that are here in any module."""
    linears = [module for module in llm.loaded.model.modules() if isinstance(module, Linear)]
    return {adapter_id for linear in linears if linear.adapter is not None for adapter_id in linear.adapter.adapter_ids}  # type: ignore[attr-defined]


def answer(live: Live, **more: Any) -> list[int]:
    reply = live.post({**ASKED, **more})
    assert reply.status_code == 200, reply.text
    ids: list[int] = reply.json()["answers"][0]
    return ids


def alone(folder: Path, tiny_folder: Path, adapter: str, **asked: Any) -> list[int]:
    """What a fresh process with this adapter answers."""
    fresh = LLM(tiny_folder, device="cpu", dtype="float32", numerics="plain", adapters={"it": folder / adapter})
    return list(fresh.generate([ASKED["ids"]], GREEDY, adapter="it")[0].token_ids)


def test_who_loads_and_unloads_is_written_down(server: Live, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "spyglass.audit"):
        assert load(server, "mine", "one") == 200 and load(server, "other", "none") == 404
        assert unload(server, "mine") == 200
    lines = [(r.getMessage(), r.__dict__["request"]) for r in caplog.records if r.name == "spyglass.audit"]
    assert [event for event, _ in lines] == ["adapter loaded", "adapter unloaded"]
    assert all(who["adapter"] == "mine" and who["key"] == "none" and who["client"] == "127.0.0.1" for _, who in lines)
    assert lines[0][1]["folder"] == str(root.resolve() / "one") and lines[0][1]["request_id"]


def told_of(caplog: pytest.LogCaptureFixture, path: str) -> list[dict[str, Any]]:
    """What the log says of requests for a path."""
    told = [record.__dict__["request"] for record in caplog.records if record.getMessage() == "request"]
    return [one for one in told if one["path"] == path]


@pytest.mark.parametrize("path", [LOAD, "/plain"])
def test_who_leaves_in_the_middle_of_a_body_is_no_fault_of_ours(
    server: Live, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = server.client.base_url
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with caplog.at_level(logging.INFO, "spyglass.server"):
        with socket.create_connection((url.host, url.port), 60) as client:
            client.sendall(f"{head}content-length: 100\r\n\r\n{{".encode())
        wait_for(lambda: told_of(caplog, path))
    (told,) = told_of(caplog, path)
    assert told["status"] == 499 and told["client_left"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_it_is_off_unless_the_server_was_started_so(live: Live, root: Path) -> None:
    for path in (LOAD, UNLOAD):
        assert live.post({"lora_name": "one", "lora_path": "one"}, path).status_code == 404
    for options in ({"allow_adapter_loading": True}, {"adapter_root": str(root)}):
        with pytest.raises(ConfigError, match="give both"):
            ServerConfig(**options)
    with pytest.raises(ConfigError, match="the second a folder"):
        ServerConfig(allow_adapter_loading=True, adapter_root=str(root / "absent"))


def test_what_is_loaded_is_served_tried_and_listed_until_it_is_unloaded(
    server: Live, model: LLM, root: Path, tiny_folder: Path
) -> None:
    base = answer(server)
    assert load(server, "mine", "one") == 200 and load(server, "other", root / "two") == 200
    assert names(server) == ["tiny", "mine", "other"]
    assert server.client.get("/v1/models/mine").json()["parent"] == "tiny"
    health = server.client.get("/health")
    assert health.status_code == 200 and health.json()["features"]["adapter mine"] == "ok"
    assert answer(server, model="mine") == alone(root, tiny_folder, "one") != base
    assert answer(server) == base
    assert unload(server, "mine") == 200
    assert names(server) == ["tiny", "other"] and "adapter mine" not in server.client.get("/health").json()["features"]
    assert server.post({**ASKED, "model": "mine"}).status_code == 404 == unload(server, "mine")
    wait_for(lambda: len(adapter_ids(model)) == 1)
    assert answer(server) == base


def test_a_name_means_what_was_loaded_last_under_it(server: Live, root: Path, tiny_folder: Path) -> None:
    """Prefixes are cached by what an adapter is, pictures too; neither of the old adapter is used for the new one."""
    for folder in ("one", "two", "one"):
        assert load(server, "mine", folder) == 200
        assert answer(server, model="mine") == alone(root, tiny_folder, folder)
        assert unload(server, "mine") == 200
    picture = {"images": [data_url()]}
    assert load(server, "mine", "sees") == 200
    seen = answer(server, model="mine", **picture)
    assert unload(server, "mine") == 200 and load(server, "mine", "two") == 200
    assert seen != answer(server, model="mine", **picture) and seen != answer(server, **picture)


@pytest.mark.parametrize(
    ("name", "path", "status", "told"),
    [
        ("x", "cut", 400, "adapter_model.safetensors"),
        ("x", "bogus", 400, "9"),
        ("x", "absent", 404, "no folder 'absent'"),
        ("x", ".", 400, "no adapter"),
        ("x", "", 400, "lora_path is empty"),
        ("x", "../elsewhere", 400, "not below"),
        ("x", "link", 400, "not below"),
        ("x", "/etc", 400, "not below"),
        ("x", "circle", 400, "circle"),
        ("x", "a\0b", 400, "no path"),
        ("x", "a" * 9999, 400, "no path"),
        ("tiny", "one", 409, "'tiny' is served already"),
        (" x", "one", 400, "an adapter cannot be called ' x'; a name is 1 to 128 letters"),
        ("", "one", 400, "a name is"),
        ("..", "one", 400, "a name is"),
        ("a/b", "one", 400, "a name is"),
        ("x" * 10_000, "one", 400, "a name is"),
        ("x", "loud", 400, "no finite logits"),
        (5, "one", 400, "lora_name must be a string"),
        ("x", None, 400, "lora_path must be a string"),
    ],
)
def test_what_cannot_be_loaded_is_refused_and_nothing_has_changed(
    server: Live, model: LLM, name: Any, path: Any, status: int, told: str
) -> None:
    reply = server.post({"lora_name": name, "lora_path": path}, LOAD)
    assert reply.status_code == status and told in reply.json()["error"]["message"], reply.text
    assert names(server) == ["tiny"]
    wait_for(lambda: not adapter_ids(model))
    assert server.client.get("/health").status_code == 200


def test_an_adapter_that_was_made_for_another_model_is_logged(
    server: Live, llm: LLM, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = random_adapter(shapes_of(llm.loaded.model), ["attention"], rank=2, seed=9, size=1.0)
    write_adapter(root / "foreign", adapter, base_model="somebody/Other")
    with caplog.at_level("WARNING", logger="spyglass"):
        assert load(server, "mine", "foreign") == 200
    assert "foreign was made for 'Other', this is 'tiny'" in caplog.text


def test_a_name_that_is_taken_and_fields_that_mean_something_else_are_refused(server: Live) -> None:
    assert load(server, "mine", "one") == 200
    assert load(server, "mine", "two") == 409
    body = {"lora_name": "more", "lora_path": "two"}
    assert "load_inplace is not available" in server.post({**body, "load_inplace": True}, LOAD).text
    assert server.post({**body, "load_inplace": False}, LOAD).status_code == 200
    assert "did you mean lora_path" in server.post({**body, "lora_paths": "x"}, LOAD).text
    assert server.client.post(LOAD, content=b"[]", headers={"content-type": "application/json"}).status_code == 400


def test_streams_go_on_as_in_quiet_while_adapters_come_and_go(server: Live, model: LLM) -> None:
    assert load(server, "mine", "two") == 200
    asked = [{**ASKED, "max_tokens": 30, "ids": [0, n], "model": ("tiny", "mine")[n % 2]} for n in range(6)]
    quiet = [answer(server, **body) for body in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        streams = [pool.submit(server.post, {**body, "stream": True}) for body in asked]
        statuses = [load(server, f"extra{n}", "cut" if n == 2 else "one") for n in range(4)]
        assert unload(server, "extra0") == 200 and unload(server, "mine") == 200, "while streams use it"
        assert "mine" not in names(server)
        told = [events(stream.result().text) for stream in streams]
    assert statuses == [200, 200, 400, 200]
    assert [ids_of(stream) for stream in told] == quiet
    wait_for(lambda: len(adapter_ids(model)) == 2)


def test_the_memory_of_an_adapter_stays_until_its_last_answer_has_ended(server: Live, model: LLM) -> None:
    assert load(server, "mine", "one") == 200
    expected = answer(server, model="mine", max_tokens=100)
    with server.client.stream(
        "POST", "/plain", json={**ASKED, "max_tokens": 100, "model": "mine", "stream": True}
    ) as on:
        lines = on.iter_lines()
        next(lines)
        assert unload(server, "mine") == 200 and adapter_ids(model)
        assert load(server, "mine", "two") == 200, "the name is free at once"
        text = "\n".join(lines)
    assert ids_of([event for event in events(text) if "index" in event]) == expected
    wait_for(lambda: len(adapter_ids(model)) == 1)


def test_calls_in_a_race_are_each_answered_and_no_name_is_listed_twice(server: Live) -> None:
    statuses: list[int] = []
    surprises: list[str] = []

    def work(seed: int) -> None:
        source = random.Random(seed)
        for _ in range(12):
            act = source.randrange(3)
            if act == 0:
                statuses.append(load(server, "x", source.choice(["one", "two"])))
            elif act == 1:
                statuses.append(unload(server, "x"))
            else:
                statuses.append(server.post({**ASKED, "model": "x"}).status_code)
            listed = names(server)
            if len(set(listed)) != len(listed):
                surprises.append(str(listed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 404, 409} and not surprises
    assert server.client.get("/health").status_code == 200
