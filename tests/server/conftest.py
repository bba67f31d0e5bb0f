"""One tiny model for all server tests, and a server of the tests' own protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.server.app import create_app
from tests.server.parts import Live, plain, running


@pytest.fixture(scope="session")
def llm(tiny_folder: Path) -> LLM:
    """Without caches: what it counts does not depend on what was asked before."""
    return LLM(
        tiny_folder,
        device="cpu",
        dtype="float32",
        numerics="plain",
        max_sequences=8,
        cache_bytes=120 << 20,
        prefix_cache_bytes=0,
        image_cache_bytes=0,
    )


@pytest.fixture(scope="module")
def live(llm: LLM) -> Iterator[Live]:
    with running(create_app(llm, ServerConfig(grace_seconds=1), endpoints=[plain(llm)])) as server:
        yield server
