"""The load generator against a real server: what it sends is what the server takes."""

from __future__ import annotations

from spyglass.bench.serve import run
from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.server.app import create_app
from tests.server.parts import running


def test_every_request_of_the_benchmark_is_answered(llm: LLM) -> None:
    with running(create_app(llm, ServerConfig(grace_seconds=1))) as server:
        few = ["--url", server.url, "--requests", "6", "--words", "4", "--max-tokens", "3", "--pictures", "0.5"]
        assert run([*few, "--clients", "3"]) == 0
        assert run([*few, "--rate", "50"]) == 0
