"""`make help` names every target that there is, and none besides."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_make_help_names_every_target() -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert targets is not None
    done = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True)
    named = [re.findall(r"[\w-]+", line[len("make ") : 21]) for line in done.stdout.splitlines() if line[:5] == "make "]
    assert sorted(name for line in named for name in line) == sorted(set(targets[1].split()) - {"help"})
