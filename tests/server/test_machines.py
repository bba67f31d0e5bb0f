"""People's machines: a proxy's path before ours, a Unix socket, no home folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.errors import ConfigError
from spyglass.ops import build
from spyglass.server.app import create_app
from spyglass.server.page import PAGE
from spyglass.server.run import bind_unix
from tests.server.parts import plain, running


def test_below_a_proxys_path_everything_is_found_whether_or_not_the_proxy_cuts_it_off(llm: LLM) -> None:
    config = ServerConfig(root_path="/models/one", grace_seconds=1)
    with running(create_app(llm, config, endpoints=[plain(llm)])) as live:
        for prefix in ("", "/models/one"):
            assert live.client.get(f"{prefix}/health").status_code == 200
            assert live.post({}, f"{prefix}/plain").status_code == 200
            assert live.client.get(f"{prefix}/").text == live.client.get("/").text
        assert live.client.get("/models/ones/health").status_code == 404
    assert 'fetch("/' not in PAGE.read_text(encoding="utf-8") and "fetch(`/" not in PAGE.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="root_path"):
        ServerConfig(root_path="models")


def test_a_unix_socket_is_listened_on_and_one_left_behind_is_replaced(tmp_path: Path, llm: LLM) -> None:
    path = str(tmp_path / "spyglass.sock")
    bind_unix(path).close()
    app = create_app(llm, ServerConfig(grace_seconds=1), endpoints=[plain(llm)])
    with running(app, uds=path) as live:
        assert live.post({}).status_code == 200
        with pytest.raises(ConfigError, match="a server listens at"):
            bind_unix(path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is no socket"):
        bind_unix(str(tmp_path / "file"))


def test_without_a_home_folder_caches_go_where_only_this_user_writes(
    tmp_path: Path,
) -> None:
    script = "from spyglass.ops.build import _cache_folder as f; print(f())"
    code = f"import os, pwd\npwd.getpwuid = lambda _: (_ for _ in ()).throw(KeyError())\n{script}"
    environment = {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": str(Path(build.__file__).parents[2]),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(tmp_path) and folder.parents[1].stat().st_mode & 0o077 == 0
