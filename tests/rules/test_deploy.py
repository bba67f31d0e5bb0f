"""What the container and service files call exists: verbs, options, environment variables, files."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from spyglass.cli.main import build_parser, load_verb
from spyglass.config.engine import EngineConfig
from spyglass.config.server import ServerConfig

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.iterdir() if path.is_file())


def _commands() -> list[list[str]]:
    text = "\n".join(path.read_text() for path in FILES)
    lists = re.findall(r'\["serve"[^\]]*\]', text)
    found = [[re.sub(r"^\$\{.*", "folder", word) for word in re.findall(r'"([^"]*)"', each)] for each in lists]
    unit = re.search(r"exec \S+/spyglass (serve .*)'", text)
    assert unit is not None
    return [*found, ["folder" if word.startswith("$") else word for word in shlex.split(unit[1])]]


def test_every_command_is_one_that_the_command_line_takes() -> None:
    commands = _commands()
    assert len(commands) == 4
    parser = build_parser("serve", load_verb("serve"))
    for command in commands:
        assert parser.parse_args(command[1:]).host in ("0.0.0.0", "127.0.0.1")


@pytest.mark.parametrize("path", [*FILES, ROOT / "docs/install.md"], ids=lambda path: path.name)
def test_every_option_variable_is_one_that_is_read(path: Path) -> None:
    known = {f"SPYGLASS_{item.name.upper()}" for item in fields(EngineConfig)}
    known |= {f"SPYGLASS_SERVER_{item.name.upper()}" for item in fields(ServerConfig)} | {"SPYGLASS_MODEL"}
    assert set(re.findall(r"SPYGLASS_[A-Z_]*[A-Z]", path.read_text())) <= known


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd on this machine")
def test_the_unit_is_one_that_systemd_takes() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(DEPLOY / "spyglass.service")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_files_that_the_image_copies_are_there() -> None:
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            for name in line.split()[1:-1]:
                assert (ROOT / name).exists(), name
