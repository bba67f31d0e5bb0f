"""What the documents show, runs: their `python` and `sh` blocks, in an empty folder with a photo and a model in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spyglass.tiny_world.questions import KINDS

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ANSWER = re.compile(r"^(?:spyglass run|print\().*#\s+(\S.*)$", re.MULTILINE)  # as the document shows it
MAKE_TARGET = re.compile(r"\bmake ([a-z]+(?:-[a-z]+)*)\b")


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks() -> list[tuple[str, str, str]]:
    found = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 1
            found.append((f"{path.name}:{line}", match[1], match[2]))
    return found


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two images that the documents use: one where a checkout has it, one of the reader's own; the
    models come with the package."""
    import skimage

    folder = tmp_path_factory.mktemp("desk")
    (folder / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "shapes.jpg", folder / "examples")
    shutil.copy(Path(skimage.__file__).parent / "data" / "rocket.jpg", folder / "photo.jpg")
    return folder


def run_shell(script: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("place", "language", "code"), blocks(), ids=[block[0] for block in blocks()])
def test_the_example_runs(place: str, language: str, code: str, desk: Path) -> None:
    if language == "sh":
        said = run_shell(code, desk).splitlines()
        for answer in ANSWER.findall(code):
            assert answer in said, f"{place}\n{answer} is in none of {said}"
        return
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=desk,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{place}\n{done.stdout}\n{done.stderr}"
    assert all(answer in done.stdout for answer in ANSWER.findall(code)), f"{place}\n{done.stdout}"


def test_every_make_target_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {word for path in documents() for word in MAKE_TARGET.findall(path.read_text(encoding="utf-8"))}
    assert named - {"it", "sure", "a", "the"} <= targets


def test_every_path_in_the_readme_tree_exists() -> None:
    tree = re.search(r"```\nspyglass/\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert tree is not None
    for line in tree[1].splitlines():
        inside = line.startswith("  ")
        path = ROOT / ("spyglass" if inside else ".") / line.split()[0]
        assert path.exists(), line


def test_every_room_stands_in_the_readme_tree() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rooms = [p for p in (ROOT / "spyglass").iterdir() if p.name[0] not in "_." and (p.is_dir() or p.suffix == ".py")]
    assert not [room.name for room in rooms if f"  {room.name}" not in text]


def test_the_readme_names_kinds_of_questions_as_they_are_printed() -> None:
    header = re.search(
        r"^\| \| all \| (.*) \| unseen pairs", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert header is not None
    named = header[1].split(" | ")
    assert len(named) >= 6 and not set(named) - set(KINDS)
