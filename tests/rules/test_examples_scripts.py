"""Every script of `examples/` runs as its first lines say, on a tiny checkpoint and a real photograph."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
TRUE_ANSWERS = {
    "ask_about_a_picture": ["It is a triangle."],
    "batch_of_prompts": ["It is yellow.", "There are three."],
}
LONGEST = 40  # lines: an example is read in one go


def command_of(script: Path) -> list[str]:
    """The command in the script's docstring, as words."""
    docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    found = re.search(rf"^ *(python examples/{script.name}.*)$", docstring, re.MULTILINE)
    assert found is not None, f"{script.name} does not say how it is run"
    return shlex.split(found[1])


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the commands make sense: a checkpoint and a few photographs."""
    import skimage

    folder = tmp_path_factory.mktemp("desk")
    data = Path(skimage.__file__).parent / "data"
    (folder / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "shapes.jpg", folder / "examples")
    for name, photograph in (("photo", "rocket.jpg"), ("first", "rocket.jpg"), ("second", "chelsea.png")):
        shutil.copy(data / photograph, folder / f"{name}.jpg")
    run([str(Path(sys.executable).parent / "spyglass"), *shlex.split("new-checkpoint demo-model --seed 0")], folder)
    return folder


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_script_runs_as_it_says(script: Path, desk: Path) -> None:
    python, _, *arguments = command_of(script)
    assert python == "python"
    said = run([sys.executable, str(script), *arguments], desk).strip()
    assert said
    assert all(answer in said for answer in TRUE_ANSWERS.get(script.stem, ())), said
    if script.stem == "finetune_on_two_pictures":
        assert said.splitlines()[-2:] == ["A rocket.", "A cat."], "what it was taught"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_script_is_short_and_uses_the_front_door_only(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST
    imported = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    assert {module for module in imported if module and module.startswith("spyglass")} == {"spyglass"}
    command_of(script)


def test_there_are_examples() -> None:
    assert len(SCRIPTS) >= 4
