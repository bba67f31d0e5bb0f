"""Imports point one way. The table says which rooms a room may import besides itself; everything else is refused.

A room is a file or folder directly under `spyglass/`. Lazy imports and those under TYPE_CHECKING count. Relative
imports and modules named by a string are refused, except where a file's whole purpose is to find a module by name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "spyglass"

ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "families": set(),
    "quant": {"errors"},
    "progress": set(),
    "machine": set(),
    "config": {"errors", "families", "quant", "progress"},
    "params": {"errors", "families", "config", "quant"},
    "batch": {"errors", "config", "prompt"},
    "prompt": {"errors", "families", "config"},
    "checkpoint": {"errors", "families", "params", "config", "quant", "progress"},
    "engram": {"errors", "params", "config", "quant", "checkpoint"},
    "plan": {"errors", "machine", "params", "config", "quant", "checkpoint"},
    "placement": {"errors", "params", "config", "checkpoint", "plan"},
    "ops": {"errors", "quant"},
    "parallel": {"errors"},
    "runtime": {"errors", "config", "batch", "prompt", "ops"},
    "layers": {"errors", "params", "quant", "ops", "parallel"},
    "vision": {"errors", "config", "batch", "ops", "parallel", "runtime", "layers"},
    "text": {"errors", "config", "batch", "quant", "ops", "parallel", "layers"},
    "model": {
        "errors", "params", "config", "batch", "quant", "checkpoint", "placement", "ops", "parallel", "layers",
        "vision", "text",
    },
    "numbers": {"config", "batch", "prompt", "engram", "quant", "ops", "runtime", "model"},
    "lora": {"errors", "params", "config", "quant", "checkpoint", "ops", "layers"},
    "engine": {
        "errors", "machine", "params", "config", "batch", "prompt", "engram", "plan", "placement", "checkpoint", "ops",
        "parallel", "runtime", "model", "lora", "text", "numbers",
    },
    "train": {
        "errors", "params", "config", "batch", "prompt", "engram", "quant", "checkpoint", "ops", "parallel", "runtime",
        "layers",
        "vision", "model", "lora", "progress",
    },
    "server": {"errors", "families", "machine", "config", "prompt", "engine", "__init__"},  # the last for `__version__`
}  # fmt: skip
BELOW_BENCH = set(ROOMS) - {"server"} | {"__init__"}
ROOMS |= {
    "tiny_world": BELOW_BENCH,
    "bench": BELOW_BENCH | {"server", "tiny_world"},
    "cli": set(ROOMS) | {"__init__", "tiny_world", "bench"},
    "__init__": {"engine", "config", "errors", "lora", "train"},
    "__main__": {"cli"},
}
FINDS_MODULES_BY_NAME = {"ops/table.py", "ops/declare.py", "ops/launches.py", "cli/main.py", "cli/bench.py"}
NO_TORCH = {"errors", "families", "config", "params", "prompt"}  # rooms that a front end without torch can load


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every module a file names, as dotted paths; `from a import b` names both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_named(tree: ast.AST) -> set[str]:
    """Rooms of ours that a file names; `from spyglass import x` names room x if there is one, else the package."""
    named = set()
    for module in imported_modules(tree):
        top, *rest = module.split(".")
        if top == "spyglass" and rest:
            named.add(rest[0] if rest[0] in ROOMS else "__init__")
    return named


def violations(room: str, source: str) -> set[str]:
    return rooms_named(ast.parse(source)) - ROOMS[room] - {room}


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_the_rooms_its_own_room_may(path: Path) -> None:
    room = room_of(path)
    assert room in ROOMS, f"room {room} has no row in the table"
    bad = violations(room, path.read_text(encoding="utf-8"))
    assert not bad, f"{path.relative_to(PACKAGE)} (room {room}) may not import {sorted(bad)}"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_are_named_by_strings_only_where_that_is_the_purpose(path: Path) -> None:
    if str(path.relative_to(PACKAGE)) in FINDS_MODULES_BY_NAME:
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    called = {ast.unparse(node.func).split(".")[-1] for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not called & {"import_module", "__import__", "exec"}


@pytest.mark.parametrize(
    "path", [p for p in files() if room_of(p) in NO_TORCH], ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_rooms_without_torch_never_name_it(path: Path) -> None:
    assert "torch" not in {module.split(".")[0] for module in imported_modules(ast.parse(path.read_text("utf-8")))}


def test_the_table_has_no_cycle() -> None:
    """A room may not reach itself through rooms it may import, so an order from bottom to top exists."""
    remaining = {room: allowed - {"__init__"} for room, allowed in ROOMS.items() if room != "__init__"}
    while remaining:
        free = [room for room, allowed in remaining.items() if not allowed & remaining.keys()]
        assert free, f"cycle among {sorted(remaining)}"
        for room in free:
            del remaining[room]


@pytest.mark.parametrize(
    ("room", "source", "expected"),
    [
        ("ops", "import spyglass.engine", {"engine"}),
        ("ops", "from spyglass import model", {"model"}),
        ("ops", "def f():\n    from spyglass.batch.types import Batch", {"batch"}),
        ("ops", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import spyglass.text.v4", {"text"}),
        ("ops", "from spyglass.errors import DeviceError\nimport spyglass.ops.table", set()),
        ("config", "from spyglass import LLM", {"__init__"}),
    ],
)
def test_lazy_and_type_checking_imports_count(room: str, source: str, expected: set[str]) -> None:
    assert violations(room, source) == expected


def test_relative_imports_are_refused() -> None:
    with pytest.raises(AssertionError, match="relative import"):
        list(imported_modules(ast.parse("from . import model")))
