"""The examples of docs/server.md, run against a live server."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.server.app import create_app
from spyglass.server.protocols.endpoints import make_endpoints
from tests.server.parts import Live, running
from tests.server.protocol_parts import served_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "server.md"
ANSWER = re.compile(r"\s#\s+(\S.*)$", re.MULTILINE)  # as the page shows it
BLOCKS = re.findall(r"^```(python|sh) live\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def served() -> Iterator[Live]:
    llm = LLM("spyglass-tiny-v4", device="cpu", threads=1)
    with running(create_app(llm, ServerConfig(grace_seconds=1, model_name=("spyglass-tiny-v4",)))) as server:
        yield server


@pytest.mark.parametrize(("language", "code"), BLOCKS, ids=[f"{n}" for n in range(len(BLOCKS))])
def test_the_example_runs(
    language: str,
    code: str,
    served: Live,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "examples").mkdir()
    shutil.copy(PAGE.parents[1] / "examples" / "shapes.jpg", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    answers = ANSWER.findall(code)
    assert answers, "an example shows what comes back"
    code = code.replace("http://localhost:8000", served.url)
    if language == "python":
        exec(compile(code, str(PAGE), "exec"), {})
        said = capsys.readouterr().out
        assert all(answer in said for answer in answers), said
        return
    if shutil.which("curl") is None:
        pytest.skip("there is no curl on this machine")
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and all(answer in done.stdout for answer in answers), done.stdout + done.stderr


def test_every_path_is_documented() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not [endpoint.path for endpoint in make_endpoints(served_of()) if f"`{endpoint.path}`" not in text
                and f"POST {endpoint.path}`" not in text]  # fmt: skip
