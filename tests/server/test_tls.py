"""https from two files, which may change while the server runs."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.errors import ConfigError
from spyglass.server.app import create_app
from spyglass.server.tls import Certificate
from tests.server.parts import plain, running, wait_for

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl makes the certificates; it is not here"
)


def make(folder: Path, name: str, *options: str) -> tuple[str, str]:
    """A certificate of its own and its key."""
    folder.mkdir(exist_ok=True)
    chain, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    files = ["-subj", f"/CN={name}", "-keyout", str(key), "-out", str(chain)]
    subprocess.run([*command, *files, *(options or ["-nodes"])], check=True, capture_output=True)
    return str(chain), str(key)


def test_a_renewed_certificate_is_served_without_a_restart_and_a_broken_one_is_not(
    llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain, key = make(tmp_path / "used", "first")
    certificate = Certificate(chain, key)
    config = ServerConfig(tls_cert=chain, tls_key=key, grace_seconds=1)
    with running(create_app(llm, config, endpoints=[plain(llm)]), certificate=certificate) as live:
        place = live.url.removeprefix("https://").split(":")

        def served() -> str:
            return ssl.get_server_certificate((place[0], int(place[1])))

        assert live.post({"max_tokens": 2}).status_code == 200
        first = served()
        assert first == Path(chain).read_text() and not certificate.reload_if_changed()
        other = make(tmp_path / "other", "second")
        shutil.copy(other[0], chain)
        wait_for(lambda: "the old one stays" in caplog.text)  # the key is still that of the old one
        assert served() == first
        shutil.copy(other[1], key)
        wait_for(lambda: served() == Path(other[0]).read_text() != first)
        assert live.post({"max_tokens": 2}).status_code == 200, "connections from before go on"


def test_files_that_cannot_serve_are_told_at_the_start(tmp_path: Path) -> None:
    chain, key = make(tmp_path / "a", "a")
    _, other = make(tmp_path / "b", "b")
    locked = make(tmp_path / "c", "c", "-passout", "pass:x")
    for files, why in (
        ((chain, other), "cannot be used"),
        ((str(tmp_path / "none"), key), "No such file"),
        ((key, chain), "cannot be used"),
        (locked, "the key is encrypted"),
    ):
        with pytest.raises(ConfigError, match=why):
            Certificate(*files)
    with pytest.raises(ConfigError, match="give both or neither"):
        ServerConfig(tls_cert=chain)
