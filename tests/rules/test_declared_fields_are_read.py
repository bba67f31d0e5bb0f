"""A field that a dataclass declares is read somewhere in the package: what nobody reads says what is not so.

A field counts as read when an attribute of its name is loaded anywhere in the package or its scripts. Classes that are
read as a whole, to be written as JSON or compared, are exempt by name, and so are the rows of benchmarks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "spyglass"
SCRIPTS = PACKAGE.parent / "scripts"
READ_WHOLE = {
    "MemoryPlan",  # the JSON of `spyglass check --plan`
    "Fit",  # a part of it
    "Record",  # a line of the server's log
    "EngineStats",  # for users
    "Counters",  # becomes an `EngineStats`
    "StepResult",  # for whoever drives steps; drafting reads what was captured
    "Words",  # two cases are the same when all of it is
}


def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def declared(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(class, field) of every dataclass."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and is_dataclass(node):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    if "ClassVar" not in ast.unparse(statement.annotation):
                        yield node.name, statement.target.id


def read_attributes(tree: ast.Module) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def unread(sources: dict[str, ast.Module]) -> list[str]:
    scripts = [ast.parse(path.read_text("utf-8")) for path in SCRIPTS.rglob("*.py")]
    read = set().union(*(read_attributes(tree) for tree in [*sources.values(), *scripts]))
    return [
        f"{file}: {name}.{field}"
        for file, tree in sources.items()
        for name, field in declared(tree)
        if field not in read and name not in READ_WHOLE and not file.startswith("bench/")
    ]


def test_every_declared_field_is_read() -> None:
    assert not unread(trees())


def test_a_field_that_nobody_reads_is_found() -> None:
    source = "@dataclass\nclass A:\n    read_here_only_x: int\n    never_read_y: int\nprint(a.read_here_only_x)"
    assert unread({"a.py": ast.parse(source)}) == ["a.py: A.never_read_y"]
