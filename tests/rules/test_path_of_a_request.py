"""A chat request is followed from its first byte to a kernel and back: how many files of ours run, how long they are.

Who wants to understand one request must read these. Of the ops, which are each other's like, one is counted. The bounds
are what is reached; they go down, not up.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import spyglass
from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.server.app import create_app
from tests.server.parts import data_url, running

PACKAGE = Path(spyglass.__file__).parent
MAX_FILES, MAX_LINES = 83, 14_400
ONE_OP = "ops/linear_block/"


@pytest.mark.slow
def test_few_files_run_between_a_chat_request_and_its_answer() -> None:
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code.co_filename.startswith(str(PACKAGE)):
            seen.add(frame.f_code)

    content = [{"type": "image_url", "image_url": {"url": data_url()}}, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3}
    app = create_app(LLM("spyglass-tiny-v4"), ServerConfig())
    threading.settrace(note)  # of threads that begin now: the server's and the engine's
    try:
        with running(app) as live:
            live.wait_until_idle()
            seen.clear()
            assert live.post(body, "/v1/chat/completions").status_code == 200
            found = {Path(code.co_filename).relative_to(PACKAGE) for code in set(seen)}
    finally:
        threading.settrace(None)  # type: ignore[arg-type]  # as its documentation has it
    counted = {path for path in found if path.match("ops/*.py") or not path.match("ops/*/*.py")}
    counted |= {path for path in found if str(path).startswith(ONE_OP)}
    lines = {path: len((PACKAGE / path).read_text(encoding="utf-8").splitlines()) for path in counted}
    listed = "\n".join(f"{count:5} {path}" for path, count in sorted(lines.items()))
    assert len(lines) <= MAX_FILES and sum(lines.values()) <= MAX_LINES, (
        f"{len(lines)} files, {sum(lines.values())} lines:\n{listed}"
    )
