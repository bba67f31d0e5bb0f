"""Pauses of Python's own, which a server keeps short while it runs."""

from __future__ import annotations

import gc
import sys

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.engine.worker import EngineWorker
from spyglass.server.app import create_app
from tests.scripted import ScriptedEngine
from tests.server.parts import running


def test_while_a_server_runs_what_was_loaded_is_no_garbage_and_the_interpreter_changes_hands_often(llm: LLM) -> None:
    interval = sys.getswitchinterval()
    app = create_app(llm, ServerConfig(grace_seconds=1), worker=EngineWorker(ScriptedEngine(), max_live=3))
    with running(app):
        loaded = gc.get_freeze_count()
        assert sys.getswitchinterval() <= 0.0005 < interval
        assert len(gc.get_objects()) < loaded, "the collector looks at little more than what came since"
    assert gc.get_freeze_count() == 0 and sys.getswitchinterval() == interval
