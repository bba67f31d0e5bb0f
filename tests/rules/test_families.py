"""What one model family does differently stands in `families.py`: no other file names a family or asks for one.

Exceptions: the readers of config.json, of which each family has its own, and files that mean one family and say so by
its record (`families.V4`).
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from spyglass.families import FAMILIES

PACKAGE = Path(__file__).resolve().parents[2] / "spyglass"
NAMES = {name for family in FAMILIES.values() for name in (family.name, family.short_name, family.title)}
USE_A_RECORD = {
    "config/read.py",  # which reader belongs to which
    "config/read_v4.py",
    "config/read_v41.py",
    "cli/inspect.py",  # whose images are shown when nothing is said
    "tiny_world/scene.py",  # a world drawn for the size that one planner makes of it
}
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "families.py")


def faults(source: str, file: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in NAMES:
            found.append(f"line {node.lineno} says {node.value!r}")
        if isinstance(node, ast.ImportFrom) and node.module == "spyglass.families" and file not in USE_A_RECORD:
            found += [f"line {node.lineno} imports {name.name}" for name in node.names if name.name in ("V4", "V41")]
        if isinstance(node, ast.Compare) and any(
            "family" in ast.unparse(side) for side in (node.left, *node.comparators)
        ):
            if any(isinstance(side, ast.Constant) for side in (node.left, *node.comparators)):
                found.append(f"line {node.lineno} compares a family")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_but_one_names_a_family(path: Path) -> None:
    assert not faults(path.read_text("utf-8"), str(path.relative_to(PACKAGE)))


@pytest.mark.parametrize(
    "source", ['a = "deepseek_v41"', 'if config.family == "x": pass', "from spyglass.families import V41", 'b = "v4"']
)
def test_a_file_that_knows_a_family_is_found(source: str) -> None:
    assert faults(source, "server/x.py")
