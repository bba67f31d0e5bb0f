"""Help and prompt building never load torch, so that a shell answers at once and a front end stays small."""

from __future__ import annotations

import subprocess
import sys

import pytest


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {line.split(".")[0] for line in done.stdout.splitlines()}


@pytest.mark.parametrize("module", ["spyglass", "spyglass.config", "spyglass.prompt", "spyglass.cli.main"])
def test_importing_loads_no_torch(module: str) -> None:
    assert "torch" not in modules_after(f"import {module}")


def test_help_loads_neither_torch_nor_numpy_nor_pillow() -> None:
    loaded = modules_after("from spyglass.cli.main import main; main(['--help'])")
    assert not loaded & {"torch", "numpy", "PIL", "tokenizers", "deepseek_recipe"}
