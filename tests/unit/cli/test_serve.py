"""`spyglass serve`: what can be seen to fail is told before a model is loaded; it starts, says where, and stops."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from spyglass.cli.main import main
from spyglass.cli.options import adapters_by_name
from spyglass.cli.serve import banner
from spyglass.config.server import ServerConfig, read_server_config
from spyglass.engine.llm import LLM
from spyglass.errors import ConfigError
from spyglass.server.app import describe, served_by
from tests.unit.checkpoint.small_files import write_small

MEMORY = (
    r"[\d.]+ MB of weights read in [\d.]+ s; a KV cache of [\d,]+ tokens: "
    r"(64 conversations at once of up to [\d,]+ tokens each, )?\d+ conversations at once of [\d,]+ tokens each"
)


@pytest.fixture
def never_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **options: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("spyglass.engine.llm.LLM.__init__", load)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--port", "70000"], "port is 70000"),
        (["--max-waiting", "-1"], "max_waiting is -1"),
        (["--api-key", " "], "api_key is"),
        (["--api-key", ""], "--api-key is empty"),
        (["--host", ""], "--host is empty"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--host", "192.0.2.1"], "choose another --host"),
        (["--lora", "folder"], "expected NAME=DIR"),
        (["--lora", "a=x", "--lora", "a=y"], "names 'a' twice"),
        (["--lora", "..=x"], "an adapter cannot be called '..'"),
        (["--model-name", "a", "--lora", "a=x"], "'a' is both the model and an adapter"),
        (["--images", "-1"], "images is -1"),
    ],
)
def test_what_cannot_work_is_told_before_a_model_is_loaded(
    options: list[str], why: str, never_loads: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "spyglass-tiny-v4", *options]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"port": -1},
        {"max_waiting": -1},
        {"grace_seconds": -1},
        *({name: 0} for name in ("max_held_bytes", "max_body_bytes", "max_image_bytes", "max_total_image_bytes")),
        *({name: 0} for name in ("max_image_side", "max_image_pixels", "fetch_seconds")),
        {"api_key": ("a", " ")},
        {"model_name": ("",)},
        {"cors_origin": "https://a.example"},
        {"host": 5},
        {"without_vision": "guess"},
        {"log_level": "loud"},
    ],
    ids=str,
)
def test_a_field_that_means_nothing_is_refused_by_name(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ConfigError, match=f"{name} is"):
        ServerConfig(**changes)


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(
    never_loads: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "spyglass-tiny-v4", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in (told := capsys.readouterr().err)
    assert "choose another --port" in told


def test_adapters_have_names() -> None:
    assert adapters_by_name(["a=/x", "b=c=d"], ["c"]) == {"a": "/x", "b": "c=d"}


def test_options_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"PORT": "9000", "API_KEY": "one, two", "REMOTE_IMAGES": "true", "MAX_IMAGE_SIDE": "100"}
    environment = {f"SPYGLASS_SERVER_{name}": text for name, text in settings.items()}
    config = read_server_config({"port": 9001, "host": None}, {**environment, "SPYGLASS_DEVICE": "cpu"})
    assert config == ServerConfig(port=9001, api_key=("one", "two"), remote_images=True, max_image_side=100)
    with pytest.raises(ConfigError, match="SPYGLASS_SERVER_PROT is not known"):
        read_server_config({}, {"SPYGLASS_SERVER_PROT": "1"})


@pytest.mark.slow
def test_it_says_where_it_listens_answers_and_stops_when_told(tiny_folder: Path) -> None:
    command = [sys.executable, "-m", "spyglass.cli.main", "serve", str(tiny_folder), "--port", "0"]
    process = subprocess.Popen([*command, "--threads", "1"], stderr=subprocess.PIPE, text=True)
    killer = threading.Timer(100, process.kill)
    killer.start()
    try:
        assert process.stderr is not None
        told = {}
        while "limits" not in told:
            line = process.stderr.readline()
            assert line, told
            name, _, text = line.strip().partition(" ")
            told[name] = text.strip()
        assert told["model"].startswith("tiny (deepseek_v4, cpu") and told["vision"] == "yes: data URLs"
        assert re.fullmatch(MEMORY, told["memory"])
        url = told["clients"].split()[0]
        with urllib.request.urlopen(f"{url}/models", timeout=20) as answer:
            assert json.load(answer)["data"][0]["id"] == "tiny"
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(20) in (0, -signal.SIGTERM)
        assert [json.loads(line)["level"] for line in rest.splitlines()].count("error") == 0
        assert "Traceback" not in rest
    finally:
        killer.cancel()
        process.kill()


@pytest.mark.parametrize(
    ("vision_layers", "images", "state", "told"),
    [(1, 600, "yes", "yes: data URLs"), (1, 0, "off", r"off: .*\(--images 0\)"), (0, 600, "no", "no: .* text-only")],
)
def test_d5_banner_and_health_say_whether_images_are_taken(
    vision_layers: int, images: int, state: str, told: str, tmp_path: Path
) -> None:
    write_small(tmp_path, vision_n_layers=vision_layers)
    llm, config = LLM(tmp_path, device="cpu", images=images, max_sequences=1), ServerConfig()
    assert re.search(rf"^  vision +{told}", banner(llm, config, 80, 1), re.MULTILINE)
    served = served_by(llm, config)
    assert describe(llm, served)["vision"] == served.vision == state
